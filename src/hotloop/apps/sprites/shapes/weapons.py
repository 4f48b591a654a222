"""Swords, axes, shields and keys."""

import torch
from torch import Tensor

from hotloop.apps.sprites.canvas import CLEAR, FIRST, SECOND, THIRD, Canvas, inner, shift, spread
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.shapes.kit import finish, profile, ramp

WAVY = (0, 1, 1, 0, 0, -1, -1, 0)


def sword(dice: Dice) -> Tensor:
    """A sword that points to the upper right: blade, guard, grip and pommel along the diagonal."""
    canvas = Canvas(dice.count, dice.device)
    column, row = canvas.row.view(1, 16), 15 - canvas.row.view(16, 1)
    along, aside = column + row, column - row
    guard = dice.between("guard", 8, 10)
    _blade(canvas, dice, along, aside, guard)
    _hilt(canvas, dice, along, aside, guard)
    blade = ramp(dice, "blade", "steel steel steel steel ice gold red green purple ember blue")
    metal = ramp(dice, "metal", "gold gold wood steel red green purple blue")
    return finish(canvas, dice, blade, metal, ramp(dice, "grip", "wood red blue purple green wood"))


def _blade(canvas: Canvas, dice: Dice, along: Tensor, aside: Tensor, guard: Tensor) -> None:
    """A straight, curved or waving blade, lit from the left, sometimes with runes."""
    place = torch.arange(31, device=dice.device).view(1, 31)
    start, tip = guard[:, None], dice.between("tip", 24, 28)[:, None]
    wide = dice.choose("width", (1, 1, 2, 2, 2, 3))[:, None]
    shape = dice.below("shape", 6)[:, None]
    wave = torch.tensor(WAVY, device=dice.device)[(place + dice.below("wave", 8)[:, None]) % 8]
    bend = (place - start) * (tip - place) // 36
    axis = torch.where(shape == 5, wave, 0) + torch.where(shape == 4, 0 - bend, 0)
    reach = torch.minimum(wide, (tip - place + 2) // 2)
    reach = torch.where((place > start) & (place <= tip), reach, -1)
    off = aside - axis.to(torch.int32)[:, along.long()]
    blade = (off.abs() <= reach.to(torch.int32)[:, along.long()]) & canvas.box(1, 1, 14, 14)
    canvas.paint(blade, FIRST.mid)
    canvas.paint(blade & (off < 0), FIRST.light)
    canvas.paint(blade & (off > 0), FIRST.dark)
    step = spread(dice.between("rune step", 3, 4))
    runes = ((along // 2) % step == spread(dice.below("rune", 3))) & (along > spread(guard) + 2)
    canvas.paint(blade & (off == 0) & runes, THIRD.light, dice.chance("runes", 1, 4))


def _hilt(canvas: Canvas, dice: Dice, along: Tensor, aside: Tensor, guard: Tensor) -> None:
    """Grip, guard and pommel, from the hand outwards."""
    end, stop = spread(dice.between("pommel", 3, 4)), spread(guard)
    far = aside.abs()
    left, right, core = aside < -1, aside > 1, far <= 1
    grip = (far <= 1) & (along > end) & (along < stop)
    turns = spread(dice.between("wraps", 2, 3))
    canvas.paint(grip, THIRD.mid)
    canvas.paint(grip & ((along + spread(dice.below("wrap", 2))) % turns == 0), THIRD.dark)
    kind = dice.below("pommel kind", 3)
    pommel = (far + (along - end).abs() <= 1 + spread(kind >= 1)) & canvas.box(1, 1, 14, 14)
    canvas.paint(pommel, SECOND.mid)
    canvas.paint(pommel & (aside < 0), SECOND.light)
    canvas.paint(pommel & (aside == 0), THIRD.light, kind == 2)
    off = along - stop - (far > 2) * spread(dice.between("quillons", -1, 2))
    thick, span = spread(dice.below("bar", 2)), spread(dice.between("span", 3, 5))
    bar = (off >= -thick) & (off <= 1) & (far <= span)
    canvas.paint(bar, SECOND.mid)
    canvas.paint(bar & left, SECOND.light)
    canvas.paint(bar & right & (off <= 0), SECOND.dark)
    canvas.paint(bar & core & (off == 0), THIRD.light, dice.chance("jewel", 1, 3))


# Rows above and below the middle of an axe head, for each step away from the handle.
BITS = (
    ((1, 1, 2, 3, 4, 4), (1, 1, 2, 3, 4, 4)),
    ((1, 1, 1, 2, 2, 2), (1, 2, 3, 4, 5, 5)),
    ((2, 2, 2, 3, 3, -9), (2, 2, 3, 4, 4, -9)),
    ((1, 2, 3, 4, 3, -9), (1, 2, 3, 4, 3, -9)),
    ((1, 1, 1, 2, 4, -9), (1, 1, 1, 2, 4, -9)),
)


def axe(dice: Dice) -> Tensor:
    """An axe that stands upright, with one blade or two."""
    canvas = Canvas(dice.count, dice.device)
    double = dice.chance("double", 1, 3)
    left = torch.where(double, 7, dice.between("handle", 8, 9))
    level = dice.between("level", 5, 6)
    _handle(canvas, dice, left, level)
    bit = dice.choose("bit", BITS)
    away = torch.arange(16, device=dice.device).view(1, 16)
    head = _flank(canvas, bit, left[:, None] - 1 - away, level)
    hind = _flank(canvas, bit, away - left[:, None] - 2, level) & spread(double)
    both = (head | hind) & canvas.box(1, 1, 14, 14)
    canvas.shade(both, FIRST, 1)
    canvas.paint(both & ~(shift(both, 1, 0) & shift(both, -1, 0)), FIRST.light)
    socket = canvas.box(left - 1, level - 1, left + 2, level + 1)
    canvas.shade(socket, SECOND, 1)
    canvas.paint(canvas.box(left, level, left + dice.below("stud", 2), level), THIRD.light, dice.chance("gem", 1, 2))
    blade = ramp(dice, "blade", "steel steel steel gold ice red green purple blue ember")
    fitting = ramp(dice, "fitting", "gold wood steel red blue purple")
    return finish(canvas, dice, blade, fitting, ramp(dice, "handle", "wood wood wood red purple green"))


def _flank(canvas: Canvas, shape: Tensor, step: Tensor, level: Tensor) -> Tensor:
    """One side of an axe head: a span of rows for each column, by its distance from the handle."""
    steps = shape.shape[2]
    held = step.clamp(0, steps - 1)
    inside = (step >= 0) & (step < steps)
    above, below = shape[:, 0].gather(1, held), shape[:, 1].gather(1, held)
    return canvas.columns(level[:, None] - above, torch.where(inside, level[:, None] + below, -1))


def _handle(canvas: Canvas, dice: Dice, left: Tensor, level: Tensor) -> None:
    """A wooden shaft, wrapped where the hand holds it."""
    foot = dice.between("foot", 13, 14)
    shaft = canvas.box(left, level - dice.between("peak", 2, 4), left + 1, foot)
    canvas.paint(shaft, THIRD.mid)
    canvas.paint(shaft & canvas.box(left + 1, 0, left + 1, 15), THIRD.dark)
    turn = (canvas.row + dice.below("wrap", 2)[:, None]) % dice.between("turn", 2, 3)[:, None]
    wrapped = shaft & canvas.box(0, foot - dice.between("wrap length", 2, 5), 15, foot)
    canvas.paint(wrapped & spread(turn == 0), SECOND.light, dice.chance("wrapped", 2, 3))
    canvas.paint(canvas.box(left - 1, foot, left + 2, foot), SECOND.mid, dice.chance("pommel", 1, 2))


SHIELDS = (
    "0666666665543210",  # heater
    "0466666666666640",  # tower
    "0355666666655300",  # round
    "0355555554443210",  # kite
)
EMBLEMS = (
    "...... ...... ...... ...... ...... ......",
    "..99.. ..99.. 999999 999999 ..99.. ..99..",  # cross
    ".999.. 99.... 99.... 99.... .999.. ......",  # moon
    "..99.. 999999 .9999. .9999. 99..99 ......",  # star
    "9.99.9 999999 999999 999999 ...... ......",  # crown
)


def shield(dice: Dice) -> Tensor:
    """A shield: a rim, and a field that is divided in two colours or carries an emblem."""
    canvas = Canvas(dice.count, dice.device)
    half = profile(dice, "shape", SHIELDS)
    half = (half - 2 * dice.below("slim", 2)[:, None]).clamp(min=0)
    board = canvas.rows(half)
    field = inner(board)
    canvas.shade(board, SECOND, 1)
    canvas.paint(field, FIRST.mid)
    divided = dice.chance("divided", 1, 2)
    halves = canvas.box(8, 0, 15, 15), canvas.box(0, 0, 15, 6)
    cross = canvas.box(7, 0, 8, 15) | canvas.box(0, 6, 15, 7)
    stripes = [canvas.every(4, shifted) | canvas.every(4, shifted + 1) for shifted in (0 * canvas.row, canvas.row)]
    parts = torch.cat((*halves, cross, *stripes))[dice.below("field", 5)]
    canvas.paint(field & parts, THIRD.mid, divided)
    shadow = field & ~shift(field, -1, -1)
    canvas.paint(shadow, FIRST.dark)
    canvas.paint(shadow & parts, THIRD.dark, divided)
    canvas.paint(field & ~shift(field, 1, 1), FIRST.light, ~divided & dice.chance("lit", 1, 2))
    emblem = canvas.stamp(
        EMBLEMS, dice.below("emblem", len(EMBLEMS)), 5, dice.between("emblem row", 4, 5), only=~divided
    )
    canvas.paint(emblem & ~shift(emblem, -1, -1), THIRD.mid)
    tincture = ramp(dice, "tincture", "red red blue blue green purple night blood teal")
    rim = ramp(dice, "rim", "steel gold wood steel gold")
    return finish(canvas, dice, tincture, rim, ramp(dice, "charge", "gold bone ivory ice ember"))


BOWS = (  # the middle four pixels hold a stone or a hole
    "..2222.. .222222. .222222. .222222. .222222. ..2222..",  # disc
    ".22..22. 22222222 22222222 22222222 .222222. ..2222..",  # heart
    "...22... ..2222.. 22.22.22 22222222 .2.22.2. ...22...",  # trefoil
    "..2222.. .2....2. 2..22..2 2..22..2 .2....2. ..2222..",  # ring
    "2..22..2 22222222 22222222 22222222 .222222. ..2222..",  # crown
)
BITS_OF_KEYS = (
    "... 222 22. ... 222",
    "... 22. ... 222 22.",
    "222 2.2 222 ... ...",
    "222 22. 2.. 22. 222",
)


def key(dice: Dice) -> Tensor:
    """A key that stands upright: a bow, a shaft and the teeth of the bit."""
    canvas = Canvas(dice.count, dice.device)
    top, x = dice.between("top", 1, 2), dice.between("place", 3, 4)
    bow = canvas.art(BOWS, dice.below("bow", len(BOWS)), x, top) > 0
    end = dice.between("end", 13, 14)
    shaft = canvas.box(x + 3, top + 6, x + 4, end)
    bit = canvas.art(BITS_OF_KEYS, dice.below("bit", len(BITS_OF_KEYS)), x + 5, end - 4) > 0
    whole = bow | shaft | bit
    canvas.paint(whole, FIRST.mid)
    canvas.paint(whole & ~shift(whole, 0, 1) | (whole & ~shift(whole, 1, 0)), FIRST.light)
    canvas.paint(whole & ~shift(whole, 0, -1) & ~shift(whole, 1, 1), FIRST.mid)
    canvas.paint((shaft | bit) & ~shift(whole, -1, 0), FIRST.dark)
    canvas.paint(bow & ~shift(bow, -1, -1) & ~shift(bow, -1, 0), FIRST.dark)
    row = top + dice.between("collar row", 6, 7)
    canvas.paint(canvas.box(x + 2, row, x + 5, row), SECOND.mid, dice.chance("collared", 3, 5))
    stone = canvas.box(x + 3, top + 2, x + 4, top + 3)
    set_stone = spread(dice.chance("set stone", 1, 2))
    canvas.shade(stone & set_stone, THIRD, 1)
    canvas.paint(stone & ~set_stone, CLEAR)
    metal = ramp(dice, "metal", "gold gold gold steel steel wood red purple green ice")
    trim = ramp(dice, "trim", "gold steel wood red blue green")
    return finish(canvas, dice, metal, trim, ramp(dice, "stone", "red blue green purple ice ember"))
