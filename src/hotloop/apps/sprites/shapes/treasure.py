"""Potions, gems and hearts."""

import torch
from torch import Tensor

from hotloop.apps.sprites.canvas import BLACK, BRIGHT, FIRST, SECOND, THIRD, Canvas, inner, select, shift
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.shapes.kit import at_row, finish, profile, ramp

BOTTLES = (  # row 5 and above is the neck
    "0000322355665530",  # round
    "0000322234455665",  # cone
    "0000322345555554",  # jar
    "0000322244444443",  # vial
    "0000322366666665",  # square
    "0000322345666542",  # drop
    "0000322224566665",  # wide flask
)
LABELS = (
    "........ ........ ........ ........ ........",
    "........ ..wwww.. ..w77w.. ..wwww.. ........",
    "...ww... ..wwww.. ..kwkw.. ..wwww.. ...ww...",
    "...w.... ..www... .wwwww.. ..www... ...w....",
)


def potion(dice: Dice) -> Tensor:
    """A glass bottle with a cork and something that glows in it."""
    canvas = Canvas(dice.count, dice.device)
    half = profile(dice, "bottle", BOTTLES)
    slim = dice.between("slim", -1, 0)[:, None]
    half = torch.where(half > 6, half + 2 * slim, half) * (canvas.row < 15)
    glass = canvas.rows(half)
    inside = inner(glass)
    canvas.shade(glass, SECOND, 1)
    canvas.paint(inside, SECOND.dark)
    level = dice.between("level", 5, 9)
    liquid = glass & canvas.box(0, level, 15, 15)
    canvas.shade(liquid, FIRST, 1)
    canvas.paint(inside & canvas.box(0, level, 15, level), FIRST.light)
    canvas.paint(inside & shift(liquid, 0, 1) & dice.speckle("bubbles", 3), FIRST.light)
    canvas.stamp(LABELS, (dice.below("label", 8) - 4).clamp(min=0), 4, dice.between("label row", 8, 9))
    row = dice.between("shine row", 8, 9)
    left = 8 - at_row(half, row)
    canvas.paint(canvas.box(left + 1, row, left + 1, row + dice.between("shine", 0, 2)) & inside, BRIGHT)
    wide = dice.below("stopper", 2)
    canvas.shade(canvas.box(7 - wide, 2 - dice.below("lift", 2), 8 + wide, 3), THIRD, 1)
    brew = ramp(dice, "brew", "red blue green purple gold ember lime pink ice")
    glassy = ramp(dice, "glass", "steel steel ice blue")
    return finish(canvas, dice, brew, glassy, ramp(dice, "cork", "wood wood gold red green"))


def gem(dice: Dice) -> Tensor:
    """A cut stone whose facets catch the light from the upper left."""
    canvas = Canvas(dice.count, dice.device)
    canvas.overlay(select(dice.chance("brilliant", 1, 2), _brilliant(canvas, dice), _step_cut(canvas, dice)))
    canvas.paint(canvas.drawn & dice.speckle("glints", 1) & dice.speckle("fewer glints", 16), BRIGHT)
    stone = ramp(dice, "stone", "red blue green purple ember ice lime pink gold steel")
    return finish(canvas, dice, stone)


def _facets(canvas: Canvas, zones: tuple[tuple[Tensor, int], ...]) -> Tensor:
    """Roles from masks painted one over the other."""
    sheet = Canvas(canvas.count, canvas.device)
    for mask, role in zones:
        sheet.paint(mask, role)
    return sheet.roles


def _brilliant(canvas: Canvas, dice: Dice) -> Tensor:
    """The classic diamond from the side: a flat table, a girdle and a pavilion that ends in a point."""
    wide, table = dice.between("girdle", 5, 7), dice.between("table", 2, 4)
    top, crown = dice.between("gem top", 2, 4), dice.between("crown", 2, 4)
    girdle = top + crown
    tip = (girdle + dice.between("pavilion", 6, 8)).clamp(max=14)
    row = canvas.row.long()
    top, girdle, tip, wide, table = (each[:, None] for each in (top, girdle, tip, wide, table))
    upper = table + (row - top) * (wide - table) // (girdle - top).clamp(min=1)
    lower = wide * (tip + 1 - row) // (tip + 1 - girdle)
    half = torch.where(row < girdle, upper, lower) * ((row >= top) & (row <= tip))
    waist = dice.between("star", 2, 3)[:, None]
    core_up = (table - (row - top) * (table - waist) // (girdle - top).clamp(min=1)).clamp(min=1)
    core_down = waist * (tip + 1 - row) // (tip + 1 - girdle)
    core = torch.where(row < girdle, core_up, core_down) * (half > 0)
    stone, heart = canvas.rows(2 * half), canvas.rows(2 * core)
    crown_zone = canvas.box(0, 0, 15, girdle[:, 0] - 1)
    right = canvas.box(8, 0, 15, 15)
    return _facets(
        canvas,
        (
            (stone, FIRST.mid),
            (stone & right, FIRST.dark),
            (heart, FIRST.mid),
            (heart & ~right, FIRST.light),
            (stone & crown_zone, FIRST.light),
            (stone & crown_zone & right, FIRST.mid),
            (heart & crown_zone, BRIGHT),
            (heart & crown_zone & right, FIRST.light),
        ),
    )


def _step_cut(canvas: Canvas, dice: Dice) -> Tensor:
    """A stone from above: an octagon, an oval or a cushion, with a table in the middle."""
    wide, high = dice.between("step width", 4, 6), dice.between("step height", 5, 6)
    corner = dice.between("corner", 1, 5)
    away = (2 * canvas.row - 15).abs() // 2
    bevel = canvas.rows(2 * ((wide + high - corner)[:, None] - away).clamp(min=0))
    stone = canvas.box(8 - wide, 8 - high, 7 + wide, 7 + high) & bevel
    rim = dice.between("rim", 1, 2)
    once = inner(stone)
    table = select(rim == 2, inner(once), once)
    return _facets(
        canvas,
        (
            (stone, FIRST.mid),
            (stone & canvas.corner(13), FIRST.light),
            (stone & ~canvas.corner(19), FIRST.dark),
            (table, FIRST.mid),
            (table & ~shift(table, -1, -1), FIRST.light),
            (table & canvas.corner(14), FIRST.light),
            (table & ~shift(table, 1, 1) & canvas.corner(15), BRIGHT),
        ),
    )


HEARTS = (
    "0046666655432100",
    "0035666665432100",
    "0046666543321000",
    "0045666666654310",
    "0035555554432100",
)


def heart(dice: Dice) -> Tensor:
    """A heart: whole, cracked, half empty, striped or spotted."""
    canvas = Canvas(dice.count, dice.device)
    notch = dice.between("notch", 1, 2)
    whole = canvas.rows(profile(dice, "heart", HEARTS))
    whole = whole & ~(canvas.box(8 - notch, 0, 7 + notch, 2) | canvas.box(7, 0, 8, 3))
    canvas.shade(whole, FIRST, 2)
    _wear(canvas, dice, whole)
    x, y = dice.between("gloss x", 3, 4), dice.between("gloss y", 4, 5)
    across, down = x + dice.below("gloss wide", 3), y + dice.below("gloss high", 3)
    canvas.paint((canvas.box(x, y, across, y) | canvas.box(x, y, x, down)) & whole, BRIGHT)
    return finish(canvas, dice, ramp(dice, "flesh", "red red red red pink purple blue gold green ember ice"))


def _wear(canvas: Canvas, dice: Dice, whole: Tensor) -> None:
    """What has happened to the heart."""
    kind, body = dice.below("kind", 6), inner(whole)
    steps = (dice.words("crack")[:, None] >> (2 * canvas.row + 8)) & 3
    zig = torch.cumsum((steps - 1) % 2 * (steps - 1), 1).clamp(-2, 2)
    crack = canvas.rows(torch.ones(1, 16, device=canvas.device), 17 + 2 * zig)
    canvas.paint(crack & whole & canvas.box(0, 0, 15, dice.between("crack end", 7, 15)), BLACK, kind == 1)
    canvas.paint(whole & canvas.box(8 + dice.between("empty", -2, 2), 0, 15, 15), FIRST.dark, kind == 2)
    stripes = canvas.every(dice.between("stripe", 3, 4), canvas.row + dice.below("stripe phase", 4)[:, None])
    canvas.paint(body & stripes, FIRST.light, kind == 3)
    canvas.paint(body & dice.speckle("spots", 4), FIRST.light, kind == 4)
