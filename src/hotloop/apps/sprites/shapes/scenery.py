"""Ships and houses."""

import torch
from torch import Tensor

from hotloop.apps.sprites.canvas import BRIGHT, FIRST, FOAM, SECOND, THIRD, WATER, Canvas, shift, spread
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.shapes.kit import finish, profile, ramp

# The first row of the hull in each column: a raised stern on the left, a bow on the right.
DECKS = (
    (15, 9, 9, 10, 10, 11, 11, 11, 11, 11, 11, 10, 10, 9, 9, 15),
    (15, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 15),
    (15, 8, 9, 10, 11, 11, 11, 11, 11, 11, 11, 11, 10, 9, 8, 15),
    (15, 15, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 15, 15),
)
KEELS = (
    (0, 11, 12, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 12, 11, 0),
    (0, 12, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 12, 11, 10, 0),
)
SAILS = (  # to be laid over the mast, which stands in the middle column
    ".....4... ....24... ...324... ..3224... .32224... 322224... .....4...",  # jib to the left
    "....4.... .3222221. .3222221. 322222211 322222211 322222111 ....4....",  # square
    "....4.... ..32221.. ..32221.. ....4.... .3222221. 322222211 322222111",  # two squares
    "....4.... ....432.. ....4322. ....43222 ....43222 ....43221 ....4....",  # lateen
    "....4.... ...242... ..32432.. .3224322. .32243221 322243221 ....4....",  # sloop
)
FLAGS = ("88. 888 88.", "888 888 ...", "998 889 ...", "... ... ...")
MARKS = (
    "..... ..... .....",
    "..8.. .888. ..8..",
    ".888. .k8k. ..8..",
    "..... 88888 .....",
)


def ship(dice: Dice) -> Tensor:
    """A sailing ship on the waves: hull, mast, sails and a flag."""
    canvas = Canvas(dice.count, dice.device)
    mast = dice.between("mast", 6, 8)
    canvas.paint(canvas.box(mast, 2, mast, 11), SECOND.dark)
    top = dice.between("sail top", 3, 4)
    sail = canvas.stamp(SAILS, dice.below("sail", len(SAILS)), mast - 4, top)
    canvas.stamp(FLAGS, dice.below("flag", len(FLAGS)), mast + dice.choose("flag side", (-3, 1)), 1)
    mark = canvas.art(MARKS, dice.below("mark", len(MARKS)), mast - 2, top + dice.between("mark row", 2, 3))
    canvas.overlay(mark * sail)
    hull = canvas.columns(dice.choose("deck", DECKS), dice.choose("keel", KEELS))
    canvas.shade(hull, SECOND, 1)
    plank = dice.between("plank", 11, 12)
    canvas.paint(hull & canvas.box(0, plank, 15, plank), SECOND.dark, dice.chance("planks", 2, 3))
    holes = canvas.every(dice.between("holes", 2, 3), dice.below("hole", 3))
    ports = hull & shift(hull, 1, 0) & shift(hull, -1, 0) & canvas.box(0, 12, 15, 12) & holes
    canvas.paint(ports, THIRD.light, dice.chance("lamps", 1, 2))
    _waves(canvas, dice)
    cloth = ramp(dice, "cloth", "bone bone ivory red steel blue purple green ember")
    wood = ramp(dice, "wood", "wood wood wood blood gold night")
    return finish(canvas, dice, cloth, wood, ramp(dice, "colours", "red blue gold green purple night"))


def _waves(canvas: Canvas, dice: Dice) -> None:
    """Water along the foot of the hull, with foam on it."""
    column = canvas.row
    swell = (column + dice.below("swell", 6)[:, None]) // dice.between("swell length", 2, 3)[:, None] % 2
    top = torch.where((column >= 1) & (column <= 14), 14 - swell, 15)
    sea = canvas.columns(top, torch.where(top == 15, 0, 14))
    at_sea = dice.chance("at sea", 3, 4)
    canvas.paint(sea, WATER, at_sea)
    canvas.paint(sea & ~shift(sea, 0, 1) & dice.speckle("foam", 19), FOAM, at_sea)


ROOFS = (
    "0011233445560000",
    "0112233445566000",
    "0012345670000000",
    "0023456700000000",
    "0005556667000000",
    "0001234567000000",
)


def house(dice: Dice) -> Tensor:
    """A house from the front: a roof with its chimney, walls, a door and windows."""
    canvas = Canvas(dice.count, dice.device)
    half = profile(dice, "roof", ROOFS)
    narrow = dice.below("narrow", 2)
    half = torch.where(half > 4, half - 2 * narrow[:, None], half)
    eaves = (half > 0).long().mul(canvas.row.long()).amax(1)
    wide = half.amax(1) // 2 - dice.between("overhang", 1, 2)
    side = dice.choose("chimney side", (-1, 1))
    chimney_x = torch.where(side < 0, 8 - wide, 6 + wide)
    canvas.shade(canvas.box(chimney_x, dice.between("chimney", 2, 4), chimney_x + 1, eaves), THIRD, 1)
    wall = canvas.box(8 - wide, 6, 7 + wide, 14)
    canvas.shade(wall, SECOND, 1)
    roof = canvas.rows(half)
    canvas.shade(roof, FIRST, 1)
    _tiles(canvas, dice, roof, eaves)
    canvas.paint(wall & canvas.box(0, eaves + 1, 15, eaves + 1), SECOND.dark)
    _openings(canvas, dice, wall, wide, eaves)
    tiles = ramp(dice, "tiles", "red red blue purple green wood ember gold teal night")
    plaster = ramp(dice, "plaster", "ivory bone steel wood gold ice pink")
    return finish(canvas, dice, tiles, plaster, ramp(dice, "door", "wood red blue green blood purple"))


def _tiles(canvas: Canvas, dice: Dice, roof: Tensor, eaves: Tensor) -> None:
    """Courses of tiles, staggered, and a dark line along the eaves."""
    kind = dice.below("tiling", 3)
    odd = canvas.row % 2
    stagger = canvas.every(4, 2 * odd + dice.below("stagger", 4)[:, None])
    canvas.paint(roof & stagger, FIRST.dark, kind == 0)
    canvas.paint(roof & spread(odd == dice.below("course", 2)[:, None]), FIRST.dark, kind == 1)
    canvas.paint(roof & canvas.box(0, eaves, 15, eaves), FIRST.dark)


DOORS = (
    "7888 7889 7888 7888",
    ".88. 7888 7889 7888",
)
WINDOWS = ("kk kk", "66 ww", "wk kw", "99 99")


def _openings(canvas: Canvas, dice: Dice, wall: Tensor, wide: Tensor, eaves: Tensor) -> None:
    """A door in the middle or to one side, windows where there is room, and one under the gable."""
    place = dice.below("door place", 3)
    x = torch.where(place == 0, 6, torch.where(place == 1, 9 - wide, 3 + wide))
    canvas.stamp(DOORS, dice.below("door", len(DOORS)), x, 11)
    pane = dice.below("pane", len(WINDOWS))
    roomy = (wide > 3) & (eaves <= 10)
    row = torch.maximum(eaves + 2, torch.full_like(eaves, 10))
    canvas.stamp(WINDOWS, pane, 9 - wide, row, only=(place != 1) & roomy)
    canvas.stamp(WINDOWS, pane, 5 + wide, row, only=(place != 2) & roomy)
    attic = eaves - dice.between("attic", 3, 4)
    canvas.paint(canvas.box(7, attic, 8, attic + 1), BRIGHT, dice.chance("attic window", 1, 3) & (eaves > 7))
