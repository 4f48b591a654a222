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
    "0000322356653455",  # gourd
    "0000322235566543",  # bulb
    "0000322366655443",  # urn
    "0000322224566665",  # wide flask
    "0000322334444555",  # bell
)
LABELS = (
    "........ ........ ........ ........ ........",
    "........ ..wwww.. ..w77w.. ..wwww.. ........",
    "...ww... ..wwww.. ..kwkw.. ..wwww.. ...ww...",
    "...ww... ...ww... .wwwwww. ...ww... ...ww...",
    "........ ..w..w.. ..wwww.. ...ww... ........",
    "...w.... ..www... .wwwww.. ..www... ...w....",
    "........ wwwwwwww wwwwwwww ........ ........",
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
    layer = liquid & canvas.box(0, level + dice.between("layer", 2, 4), 15, 15)
    canvas.shade(layer & canvas.only(dice.chance("layers", 1, 5)), THIRD, 1)
    canvas.paint(inside & canvas.box(0, level, 15, level), FIRST.light)
    canvas.paint(inside & shift(liquid, 0, 1) & dice.speckle("bubbles", 3), FIRST.light)
    canvas.stamp(LABELS, (dice.below("label", 14) - 7).clamp(min=0), 4, dice.between("label row", 8, 9))
    row = dice.between("shine row", 8, 9)
    left = 8 - at_row(half, row)
    canvas.paint(canvas.box(left + 1, row, left + 1, row + dice.between("shine", 0, 2)) & inside, BRIGHT)
    canvas.paint(canvas.box(left + 2, row - 1, left + 2, row - 1) & inside, BRIGHT, dice.chance("second shine", 1, 2))
    _cork(canvas, dice)
    brew = ramp(dice, "brew", "red", "blue", "green", "purple", "gold", "ember", "lime", "pink", "ice")
    glassy = ramp(dice, "glass", "steel", "steel", "ice", "blue")
    return finish(canvas, dice, brew, glassy, ramp(dice, "cork", "wood", "wood", "gold", "red", "green"))


def _cork(canvas: Canvas, dice: Dice) -> None:
    """A stopper in the neck, and sometimes a ribbon below it."""
    wide = dice.below("stopper", 2)
    canvas.shade(canvas.box(7 - wide, 2 - dice.below("lift", 2), 8 + wide, 3), THIRD, 1)
    canvas.paint(canvas.box(6, 5, 9, 5), THIRD.light, dice.chance("ribbon", 1, 4))


def gem(dice: Dice) -> Tensor:
    """A cut stone whose facets catch the light from the upper left."""
    canvas = Canvas(dice.count, dice.device)
    cut = dice.below("cut", 6)
    planes = select(cut <= 1, _brilliant(canvas, dice), _step_cut(canvas, dice))
    planes = select(cut == 4, _crystal(canvas, dice), planes)
    canvas.overlay(select(cut == 5, _kite(canvas, dice), planes))
    canvas.paint(canvas.drawn & dice.speckle("glints", 1) & dice.speckle("fewer glints", 16), BRIGHT)
    stone = ramp(dice, "stone", "red", "blue", "green", "purple", "ember", "ice", "lime", "pink", "gold", "steel")
    return finish(canvas, dice, stone, bare=(0, 1))


def _facets(canvas: Canvas, zones: tuple[tuple[Tensor, int], ...]) -> Tensor:
    """Roles from masks painted one over the other."""
    sheet = Canvas(canvas.count, canvas.device)
    for mask, role in zones:
        sheet.paint(mask, role)
    return sheet.planes


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
    bevel = canvas.rows(2 * (canvas.each(wide + high - corner) - away).clamp(min=0))
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


def _crystal(canvas: Canvas, dice: Dice) -> Tensor:
    """A tall crystal with three faces, pointed at both ends."""
    row = canvas.row.long()
    wide, steep = dice.between("prism", 3, 4)[:, None], dice.between("steep", 1, 2)[:, None]
    top, low = dice.between("prism top", 1, 3)[:, None], dice.between("prism foot", 12, 14)[:, None]
    half = torch.minimum((row - top) * steep + 1, (low - row) * dice.between("blunt", 1, 2)[:, None] + 1)
    half = torch.minimum(half, wide) * ((row >= top) & (row <= low))
    main = canvas.rows(2 * half)
    face_half = torch.minimum(half, dice.between("face", 1, 2)[:, None])
    face = canvas.rows(2 * face_half, 16 + 2 * dice.between("turn", -1, 1)) & main
    right = canvas.box(8, 0, 15, 15) & ~face
    cap = main & canvas.box(0, 0, 15, (top + wide // steep)[:, 0])
    foot = main & canvas.box(0, (low - dice.between("foot", 0, 3)[:, None])[:, 0], 15, 15)
    return _facets(
        canvas,
        (
            (main, FIRST.light),
            (main & right, FIRST.dark),
            (face, FIRST.mid),
            (foot, FIRST.dark),
            (cap, BRIGHT),
            (cap & right, FIRST.mid),
            (cap & face, FIRST.light),
        ),
    )


def _kite(canvas: Canvas, dice: Dice) -> Tensor:
    """Four facets that meet in a cross, and a smaller kite on top of them."""
    row = canvas.row.long()
    top, low = dice.between("kite top", 1, 3)[:, None], dice.between("kite low", 12, 14)[:, None]
    waist, wide = dice.between("kite waist", 5, 9)[:, None], dice.between("kite width", 4, 6)[:, None]
    rising, falling = (row - top + 1) * wide // (waist - top + 1), (low - row + 1) * wide // (low - waist + 1)
    half = torch.where(row <= waist, rising, falling).clamp(min=0) * ((row >= top) & (row <= low))
    stone = canvas.rows(2 * half)
    table = canvas.rows(2 * (half - dice.between("kite rim", 1, 3)[:, None]).clamp(min=0))
    right, lower = canvas.box(8, 0, 15, 15), canvas.box(0, waist[:, 0] + 1, 15, 15)
    return _facets(
        canvas,
        (
            (stone, FIRST.light),
            (stone & (right | lower), FIRST.mid),
            (stone & right & lower, FIRST.dark),
            (table, BRIGHT),
            (table & (right | lower), FIRST.light),
            (table & right & lower, FIRST.mid),
        ),
    )


HEARTS = (
    "0046666655432100",
    "0056666666543210",
    "0035666665432100",
    "0046666543321000",
    "0045666666654310",
    "0035555554432100",
    "0046777776543210",
)


HEART_MARKS = (
    "..ww.. ..ww.. wwwwww ..ww.. ..ww..",  # plus
    ".9..9. 999999 999999 .9999. ..99..",  # a heart within
    "..kk.. .kkkk. ..kk.. ..kk.. .kkkk.",  # keyhole
    "kk..kk kk..kk ...... k....k .kkkk.",  # smile
    "..55.. 555555 .5555. .5555. 55..55",  # star
    "...66. ..66.. .6666. ...66. ..66..",  # bolt
)
WINGS = (
    "6..... 66.... 656... .656.. ..55..",
    ".66... 6666.. .555.. .666.. ..55..",
    "...... 666... 5666.. .5566. ..55..",
    "6.6... 6666.. 56666. .5555. ......",
)


def heart(dice: Dice) -> Tensor:
    """A heart: whole, cracked, half empty, striped, marked, winged, spotted or bound."""
    canvas = Canvas(dice.count, dice.device)
    kind = dice.below("kind", 9)
    winged = kind == 6
    half = profile(dice, "heart", HEARTS)
    half = torch.where(winged[:, None] & (half > 8), half - 2 * dice.between("slim", 1, 2)[:, None], half)
    notch = dice.between("notch", 1, 2)
    whole = canvas.rows(half) & ~(canvas.box(8 - notch, 0, 7 + notch, 2) | canvas.box(7, 0, 8, 3))
    down = dice.below("down", 2) * (half[:, 14] == 0)
    whole = select(down == 1, shift(whole, 0, 1), whole)
    wing = dice.below("wing", len(WINGS))
    canvas.stamp_pair(WINGS, wing, 1, dice.between("wing row", 3, 5), only=winged)
    canvas.shade(whole, FIRST, 2)
    canvas.stamp(
        HEART_MARKS, dice.below("heart mark", len(HEART_MARKS)), 5, dice.between("mark row", 5, 7), only=kind == 5
    )
    _wear(canvas, dice, whole, kind)
    canvas.paint(_gloss(canvas, dice, down) & whole, BRIGHT)
    flesh = ramp(dice, "flesh", "red", "red", "red", "red", "pink", "purple", "blue", "gold", "green", "ember", "ice")
    return finish(canvas, dice, flesh, ramp(dice, "trim", "gold", "steel", "ivory"), ramp(dice, "mark", "ivory", "ice"))


def _gloss(canvas: Canvas, dice: Dice, down: Tensor) -> Tensor:
    """The bright spot on the upper left lobe."""
    x, y = dice.between("gloss x", 3, 4), dice.between("gloss y", 4, 5) + down
    return canvas.box(x, y, x + dice.below("gloss wide", 3), y) | canvas.box(x, y, x, y + dice.below("gloss high", 3))


def _wear(canvas: Canvas, dice: Dice, whole: Tensor, kind: Tensor) -> None:
    """What has happened to the heart."""
    body = inner(whole)
    steps = (dice.words("crack")[:, None] >> (2 * canvas.row + 8)) & 3
    zig = torch.cumsum((steps - 1) % 2 * (steps - 1), 1).clamp(-2, 2)
    crack = canvas.rows(torch.ones(1, 16, device=canvas.device), 17 + 2 * zig)
    canvas.paint(crack & whole & canvas.box(0, 0, 15, dice.between("crack end", 7, 15)), BLACK, kind == 1)
    canvas.paint(whole & canvas.box(8 + dice.between("empty", -2, 2), 0, 15, 15), FIRST.dark, kind == 2)
    stripes = canvas.every(dice.between("stripe", 3, 4), canvas.row + canvas.each(dice.below("stripe phase", 4)))
    canvas.paint(body & stripes, FIRST.light, kind == 3)
    canvas.paint(body & dice.speckle("spots", 4), FIRST.light, kind == 4)
    band = dice.between("band", 5, 9)
    canvas.paint(whole & canvas.box(0, band, 15, band + dice.below("band wide", 2)), SECOND.mid, kind == 7)
