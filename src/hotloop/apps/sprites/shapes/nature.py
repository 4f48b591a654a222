"""Trees, mushrooms and flowers."""

import torch
from torch import Tensor

from hotloop.apps.sprites.canvas import FIRST, SECOND, THIRD, Canvas, mirror, select, shift, spread
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.shapes.kit import finish, profile, ramp

PINES = (
    "0112231235324600",
    "0122341234523460",
    "0112323434545600",
    "0123423452345600",
)


def tree(dice: Dice) -> Tensor:
    """A tree: a leafy crown of clumps or a fir in tiers, on a trunk, with fruit or blossom or none."""
    canvas = Canvas(dice.count, dice.device)
    fir = dice.chance("fir", 1, 3)
    _trunk(canvas, dice)
    crown = _clumps(canvas, dice)
    roles = select(fir, _tiers(canvas, dice), crown)
    leaves = canvas.overlay(roles)
    fruit = leaves & shift(leaves, 1, 0) & shift(leaves, -1, 0) & shift(leaves, 0, -1)
    fruit = fruit & select(dice.chance("plenty", 1, 2), dice.speckle("fruit", 2), dice.speckle("fruit", 4))
    canvas.paint(fruit, THIRD.mid, dice.chance("fruits", 2, 5))
    leaf = ramp(dice, "leaf", "green green green lime teal green ember gold pink red lime steel")
    return finish(canvas, dice, leaf, ramp(dice, "bark", "wood"), ramp(dice, "fruit", "red ember ivory pink"))


def _trunk(canvas: Canvas, dice: Dice) -> None:
    """A trunk of two or three pixels with its roots."""
    left, wide = dice.choose("trunk", ((7, 1), (7, 2), (6, 3))).unbind(1)
    trunk = canvas.box(left, 8, left + wide, 14)
    canvas.paint(trunk, SECOND.mid)
    canvas.paint(canvas.box(left + wide, 8, left + wide, 14), SECOND.dark)
    canvas.paint(canvas.box(left - 1, 14, left - 1, 14), SECOND.mid, dice.chance("left root", 1, 2))
    canvas.paint(canvas.box(left + wide + 1, 14, left + wide + 1, 14), SECOND.dark, dice.chance("right root", 1, 2))


CLUMPS = (  # middle and size of each clump of leaves, back to front, in doubled units
    ((16, 9, 8, 7), (9, 14, 7, 6), (23, 14, 7, 6), (16, 16, 8, 6), (13, 9, 6, 6)),
    ((16, 12, 10, 9), (12, 8, 6, 5), (21, 10, 6, 6), (10, 15, 6, 5), (20, 17, 7, 4)),
    ((8, 14, 6, 5), (24, 14, 6, 5), (16, 10, 9, 7), (12, 16, 7, 5), (20, 16, 7, 5)),
)


def _clumps(canvas: Canvas, dice: Dice) -> Tensor:
    """A crown of five round clumps, each with its own light and shadow."""
    sheet = Canvas(dice.count, dice.device)
    plan = dice.choose("crown", CLUMPS)
    frame = canvas.box(1, 1, 14, 12)
    for number in range(5):
        x, y, wide, high = plan[:, number].unbind(1)
        x, y = x + dice.between(f"clump x {number}", -1, 1), y + dice.between(f"clump y {number}", -1, 1)
        wide = wide + dice.between(f"clump size {number}", -1, 1)
        sheet.paint(canvas.ellipse(x, y, wide, high) & frame, FIRST.dark)
        sheet.paint(canvas.ellipse(x - 1, y - 1, wide - 1, high - 1) & frame, FIRST.mid)
        sheet.paint(canvas.ellipse(x - 2, y - 3, wide - 4, high - 4) & frame, FIRST.light)
    return sheet.roles


def _tiers(canvas: Canvas, dice: Dice) -> Tensor:
    """A fir: branches in tiers, dark below each."""
    sheet = Canvas(dice.count, dice.device)
    half = profile(dice, "tiers", PINES)
    half = half * (canvas.row < 13)
    lean = dice.between("lean", -1, 1)[:, None] * (canvas.row % 2)
    fir = canvas.rows(half, 16 + 2 * lean * (half > 4))
    sheet.paint(fir, FIRST.mid)
    under = spread(torch.cat([half[:, 1:] < half[:, :-1], half[:, :1] > 0], 1))
    sheet.paint(fir & under, FIRST.dark)
    sheet.paint(fir & ~shift(fir, -1, 0), FIRST.dark)
    sheet.paint(fir & ~shift(fir, 1, 0) & ~under, FIRST.light)
    return sheet.roles


CAPS = (
    "0035666660000000",  # dome
    "0001234567000000",  # cone
    "0234455666000000",  # bell
    "0012234566700000",  # witch's hat
    "0035677776000000",  # ball
)


def mushroom(dice: Dice) -> Tensor:
    """A toadstool: a spotted cap on a pale stem, sometimes with a little one beside it."""
    canvas = Canvas(dice.count, dice.device)
    half = profile(dice, "cap", CAPS)
    half = torch.where(half > 6, half - 2 * dice.below("slim", 2)[:, None], half)
    cap = canvas.rows(half)
    low = (half > 0).long().mul(canvas.row.long()).amax(1)
    _stem(canvas, dice, low)
    canvas.shade(cap, FIRST, 1)
    lip = canvas.box(0, low, 15, low)
    canvas.paint(cap & lip, FIRST.dark, dice.chance("lip", 1, 2))
    _spots(canvas, dice, cap & ~lip, low)
    small = dice.below("small", 4)
    x = torch.where(dice.chance("small side", 1, 2), 2, 11)
    canvas.stamp((".22. 2323 2222 .56. .56.", ".... .23. 2222 .56. .56."), small % 2, x, 10, only=small < 2)
    cloth = ramp(dice, "cap colour", "red red red purple blue gold green wood ember pink ice")
    stem = ramp(dice, "stem colour", "bone ivory ivory steel wood")
    return finish(canvas, dice, cloth, stem, ramp(dice, "spots", "bone bone bone ivory ivory ice"))


def _stem(canvas: Canvas, dice: Dice, low: Tensor) -> None:
    """A stem that may swell or taper at the foot, and gills under the cap."""
    row = canvas.row.long()
    swell = dice.between("swell", -1, 1)[:, None] * (row > dice.between("swell row", 11, 13)[:, None])
    half = (dice.between("stem", 2, 3)[:, None] + swell) * ((row >= low[:, None]) & (row <= 14))
    lean = dice.between("lean", -1, 1)[:, None] * (row > 11)
    canvas.shade(canvas.rows(2 * half, 16 + 2 * lean), SECOND, 1)
    canvas.paint(canvas.box(5, low + 1, 10, low + 1), SECOND.dark)


def _spots(canvas: Canvas, dice: Dice, cap: Tensor, low: Tensor) -> None:
    """Four round spots that keep apart."""
    shown = dice.chance("spotted", 7, 8)
    for number, x in enumerate((6, 13, 20, 26)):
        place = x + dice.between(f"spot x {number}", -2, 2)
        level = 2 * low - dice.between(f"spot y {number}", 2, 9)
        size = dice.between(f"spot {number}", 2, 3)
        spot = canvas.ellipse(place, level, size, size) & cap
        canvas.paint(spot, THIRD.mid, shown)


PETALS = (  # where the petals sit about the middle, in doubled units of a circle of radius 12
    ((0, -12), (12, 0), (0, 12), (-12, 0), (0, -12), (12, 0), (0, 12), (-12, 0)),
    ((0, -12), (11, -4), (7, 10), (-7, 10), (-11, -4), (0, -12), (11, -4), (7, 10)),
    ((0, -12), (8, -8), (12, 0), (8, 8), (0, 12), (-8, 8), (-12, 0), (-8, -8)),
)
CUPS = (  # flowers seen from the side
    "2...22...2 22.2222.22 2322222221 2322222221 2322222221 2322222211 .22222211. ..222211.. ....11....",  # tulip
    "...2222... ..223322.. .223113222 2231221322 2212112212 .221222121 .122111211 ..1222211. ....111...",  # rose
    "....33.... .2.3223.2. 2223222222 2323222322 2323223221 .232223221 .12222211. ..111111.. ....11....",  # lotus
)


def flower(dice: Dice) -> Tensor:
    """A flower on a stem with leaves: petals around a disc, or a cup seen from the side."""
    canvas = Canvas(dice.count, dice.device)
    x, y = 2 * dice.between("head x", 7, 8) + 1, 2 * dice.between("head y", 5, 6) + 1
    _stalk(canvas, dice, x)
    cup = dice.chance("cup", 1, 3)
    _petals(canvas, dice, x, y, ~cup)
    canvas.stamp(CUPS, dice.below("cup kind", len(CUPS)), x // 2 - 5, y // 2 - 4, only=cup)
    petal = ramp(dice, "petal", "red pink purple blue ember ivory ice bone gold red")
    green = ramp(dice, "green", "green green lime teal")
    return finish(canvas, dice, petal, green, ramp(dice, "disc", "gold ember wood ivory lime blood"))


def _stalk(canvas: Canvas, dice: Dice, x: Tensor) -> None:
    """A stem that bends a little, and a leaf to each side or to one."""
    bend = dice.between("bend", -1, 1)
    foot = x + 2 * bend
    stem = canvas.box(x // 2, 8, x // 2, 12) | canvas.box(foot // 2, 12, foot // 2, 14)
    canvas.paint(stem, SECOND.mid)
    canvas.paint(canvas.box(foot // 2, 13, foot // 2, 14), SECOND.dark)
    leaves = ("5... 665. .655 ....", ".... 66.. 5655 ..55")
    row = dice.between("leaf row", 10, 11)
    sides = dice.below("leaves", 4)
    left = canvas.art(leaves, dice.below("left leaf", 2), x // 2 - 4, row)
    right = mirror(canvas.art(leaves, dice.below("right leaf", 2), 11 - x // 2, row - dice.below("leaf step", 2)))
    canvas.overlay(left, sides != 1)
    canvas.overlay(right, sides != 2)


def _petals(canvas: Canvas, dice: Dice, x: Tensor, y: Tensor, only: Tensor) -> None:
    """Four to eight round petals and the disc in the middle."""
    ring = dice.choose("petals", PETALS)
    reach, size = dice.between("reach", 6, 7), dice.between("petal size", 3, 4)
    whole = canvas.ellipse(x, y, reach - 1, reach - 1)
    for number in range(8):
        across, down = ring[:, number].unbind(1)
        whole = whole | canvas.ellipse(x + across * reach // 12, y + down * reach // 12, size, size)
    whole = whole & canvas.box(1, 1, 14, 14) & spread(only)
    canvas.shade(whole, FIRST, 1)
    disc = dice.between("disc size", 2, 4)
    centre = canvas.ellipse(x, y, disc, disc) & whole
    canvas.paint(centre, THIRD.mid)
    canvas.paint(centre & ~shift(centre, 1, 1), THIRD.light)
    canvas.paint(centre & dice.speckle("seeds", 5), THIRD.dark)
