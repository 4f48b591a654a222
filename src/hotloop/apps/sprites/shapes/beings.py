"""Creatures, ghosts, skulls and fish."""

import torch
from torch import Tensor

from hotloop.apps.sprites.canvas import BLACK, FIRST, SECOND, THIRD, Canvas, mirror, spread
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.shapes.kit import at_row, finish, first_row, profile, ramp

BODIES = (
    "0000355555554000",  # blob
    "0000455553344300",  # big head
    "0002344455555500",  # slime
    "0000355443344400",  # bottle
    "0002344554433300",  # egg
    "0000045566654000",  # pumpkin
)
EARS = (
    ".... .... .... ....",
    "5... 55.. .55. ..22",  # horns
    ".22. 2332 2352 .22.",  # round ears
    ".2.. .22. .252 .222",  # cat ears
    ".6.. ..2. ..2. ...2",  # antennae
    "6... 5..6 55.5 .552",  # antlers
)
FEET = (
    ".222 .222",
    ".2.2 .2.2",
    "..22 ..22",
    "5522 .555",
)
EYES = (
    "........ .ww..ww. .wk..kw. ........",
    ".ww..ww. .wk..wk. .ww..ww. ........",
    "...ww... ..wkkw.. ..wkkw.. ...ww...",  # one eye
    "...ww... .w.wk.w. .k....k. ........",  # three eyes
    "1......1 .11..11. .wk..kw. ........",  # angry
    "........ .k....k. .k....k. ........",
    ".www.www .wkw.wkw .www.www ........",
    "...11... .ww11ww. .kw..wk. ........",
)
MOUTHS = (
    "........ ...kk... ........",
    "..k..k.. ...kk... ........",
    ".kkkkkk. .kwkkwk. ..kkkk..",
    ".kkkkkk. ..w..w.. ........",
    "..kkkk.. ..wwww.. ..kkkk..",
    ".k....k. ..kkkk.. ...88...",
)


def creature(dice: Dice) -> Tensor:
    """A little monster: a body with ears or horns, feet and a face."""
    canvas = Canvas(dice.count, dice.device)
    half = profile(dice, "body", BODIES)
    half = (half + 2 * dice.between("fat", -1, 1)[:, None] * (half > 2)).clamp(0, 12)
    top = first_row(half)
    crown = at_row(half, top)
    canvas.stamp_pair(EARS, dice.below("ears", len(EARS)), (5 - crown).clamp(min=1), (top - 3).clamp(min=1))
    canvas.stamp_pair(FEET, dice.below("feet", len(FEET)), dice.between("stance", 3, 4), 13)
    body = canvas.rows(half)
    canvas.shade(body, FIRST, 2)
    _belly(canvas, dice, body)
    face = top + dice.between("face", 1, 2)
    canvas.stamp(EYES, dice.below("eyes", len(EYES)), 4, face)
    canvas.stamp(MOUTHS, dice.below("mouth", len(MOUTHS)), 4, face + dice.between("mouth row", 3, 4))
    skin = ramp(dice, "skin", "red green blue purple gold ice lime pink ember wood")
    horn = ramp(dice, "horn", "ivory gold bone red lime ice pink")
    return finish(canvas, dice, skin, horn, ramp(dice, "tongue", "red pink red"))


def _belly(canvas: Canvas, dice: Dice, body: Tensor) -> None:
    """A pale belly, spots or plain skin."""
    kind = dice.below("belly", 4)
    patch = canvas.ellipse(16, 24, dice.between("belly width", 4, 8), dice.between("belly height", 4, 8))
    canvas.paint(patch & body, SECOND.light, kind <= 1)
    spots = dice.speckle("spots", 5) & canvas.box(0, 0, 7, 15)
    canvas.paint((spots | mirror(spots)) & body, FIRST.dark, kind == 2)


GHOST_EYES = (
    ".kk..kk. .kk..kk. ........",
    ".kk..kk. .kk..kk. .kk..kk.",
    "..k..k.. ..k..k.. ........",
    "k......k .kk..kk. .kk..kk.",
    ".kkk.kkk .kwk.kwk ........",
)
GHOST_MOUTHS = (
    "........ ........ ........",
    "...kk... ...kk... ........",
    "..k..k.. ...kk... ........",
    "..kkkk.. ..k88k.. ...kk...",
)
HATS = (
    "..k..... .kk..... .kkk.... k55kk... kkkkkkk.",  # witch
    "........ ..kkkk.. ..kkkk.. ..5555.. .kkkkkk.",  # top hat
    "........ 5...5... 5.5.5.5. 5555555. 6565656.",  # crown
)
WAVES = ((0, 0, 1, 1), (0, 1, 2, 1), (0, 2, 0, 2))


def ghost(dice: Dice) -> Tensor:
    """A floating sheet: a dome that ends in waves, with a face, sometimes a hat."""
    canvas = Canvas(dice.count, dice.device)
    hat = dice.below("hat", 8)
    top = dice.between("top", 1, 2) + 2 * (hat < len(HATS))
    wide = dice.between("width", 9, 12)
    sway = dice.between("sway", -2, 2)
    low = (canvas.row - 9).clamp(0)
    middle = 16 + low * sway[:, None] * 2 // 3
    dome = canvas.ellipse(16, 2 * top + wide, wide, wide)
    half = torch.where(canvas.row * 2 > (2 * top + wide)[:, None], wide[:, None], 0)
    sheet = dome | canvas.rows(half, middle)
    wave = dice.choose("wave", WAVES)
    phase = (canvas.row + dice.below("phase", 4)[:, None]) % 4
    hem = dice.between("hem", 13, 14)[:, None] - wave.gather(1, phase)
    sheet = sheet & canvas.columns(torch.zeros_like(hem), hem) & canvas.box(1, 1, 14, 14)
    arm_row = dice.between("arm row", 16, 20)
    arms = canvas.ellipse(16 - wide, arm_row, 3, 3) | canvas.ellipse(16 + wide, arm_row - 2 * sway, 3, 3)
    armed = spread(dice.chance("arms", 1, 2))
    sheet = sheet | (arms & armed & canvas.box(1, 1, 14, 14))
    canvas.shade(sheet, FIRST, 2)
    face = top + dice.between("face", 2, 4)
    gaze = dice.between("gaze", 3, 5)
    canvas.stamp(GHOST_EYES, dice.below("eyes", len(GHOST_EYES)), gaze, face)
    canvas.stamp(GHOST_MOUTHS, dice.below("mouth", len(GHOST_MOUTHS)), gaze, face + 3)
    canvas.stamp(HATS, hat.clamp(max=len(HATS) - 1), 4, (top - 4).clamp(min=0), only=hat < len(HATS))
    cloth = ramp(dice, "cloth", "bone bone steel ice pink lime ivory purple")
    return finish(canvas, dice, cloth, ramp(dice, "trim", "gold red purple blue"), ramp(dice, "b", "red"))


SOCKETS = (
    "..kk .kkk .kkk",
    ".kkk .kkk .kkk",
    ".kkk .kkk ..kk",
    ".k.. .kkk .kkk",
    "..k. .kkk ..k.",
)
NOSES = ("kk kk", ".. kk", "k. .k")
TOPS = (
    "5......5 55....55 .55..55. ..5..5..",  # horns
    "5..55..5 55.55.55 56566565 55555555",  # crown
)


def skull(dice: Dice) -> Tensor:
    """A skull from the front: cranium, sockets, nose and a row of teeth."""
    canvas = Canvas(dice.count, dice.device)
    topped = dice.below("top", 8)
    wide, high = dice.between("width", 5, 6), dice.between("height", 9, 10)
    top = torch.where(topped < len(TOPS), 4, dice.between("crown", 1, 3))
    level = 2 * top + high
    cranium = canvas.ellipse(16, level, 2 * wide + 1, high)
    eyes = top + dice.between("eye row", 3, 4)
    cheeks = canvas.box(8 - wide, eyes, 7 + wide, eyes + dice.between("cheek", 2, 3))
    jaw_half, jaw_end = dice.between("jaw", 3, 4), (eyes + dice.between("chin", 6, 7)).clamp(max=14)
    jaw = canvas.box(8 - jaw_half, eyes + 3, 7 + jaw_half, jaw_end)
    canvas.shade(cranium | cheeks | jaw, FIRST, 1)
    gum = jaw_end - dice.between("tooth", 1, 2)
    canvas.paint(jaw & canvas.box(0, gum, 15, gum), FIRST.dark, dice.chance("gum", 1, 2))
    gaps = canvas.every(2, dice.below("tooth phase", 2))
    canvas.paint(jaw & gaps & canvas.box(0, gum + 1, 15, jaw_end), BLACK)
    socket = canvas.stamp_pair(SOCKETS, dice.below("sockets", len(SOCKETS)), 3, eyes)
    spark_x, spark_y = dice.between("spark x", 4, 6), eyes + dice.between("spark y", 0, 1)
    spark = canvas.box(spark_x, spark_y, spark_x + dice.below("spark wide", 2), spark_y + dice.below("spark high", 2))
    canvas.paint((spark | mirror(spark)) & socket, THIRD.mid, dice.chance("glow", 2, 5))
    canvas.stamp(NOSES, dice.below("nose", len(NOSES)), 7, eyes + 3)
    canvas.stamp(TOPS, topped.clamp(max=len(TOPS) - 1), 4, 1, only=topped < len(TOPS))
    bone = ramp(dice, "bone", "bone bone bone steel ivory ivory lime ice gold")
    metal = ramp(dice, "metal", "gold wood ember gold")
    return finish(canvas, dice, bone, metal, ramp(dice, "glow", "red ember lime ice purple"))


TAILS = (
    "...55 ..556 .5566 .556. .5566 ..556 ...55",
    "....5 ..555 .5565 ..55. .5565 ..555 ....5",
    "..55. .5565 .5656 .5565 .5656 .5565 ..55.",
)
DORSALS = (
    "........ ...555.. ..55555.",
    "..5.5.5. ..55555. .555555.",
    ".....55. ...5555. .555555.",
    ".5...... .555.... .555555.",
)
FISH_EYES = ("ww wk", "wk ww", "kw kk", "6k 66")


def fish(dice: Dice) -> Tensor:
    """A fish that swims to the left: body, tail, fins, scales and sometimes bubbles."""
    canvas = Canvas(dice.count, dice.device)
    level = 2 * dice.between("level", 7, 8) + 1
    long, high = dice.between("long", 9, 11), dice.between("high", 6, 10)
    middle = 3 + long
    body = canvas.ellipse(middle, level, long, high)
    snout = canvas.ellipse(middle - 2, level + dice.between("snout", -1, 1), long - 1, high - 2)
    body = (body | snout) & canvas.box(1, 2, 13, 13)
    tail_x = (middle + long) // 2 - 2
    canvas.stamp(TAILS, dice.below("tail", len(TAILS)), tail_x.clamp(max=10), level // 2 - 3)
    top = (level - high) // 2
    canvas.stamp(DORSALS, dice.below("dorsal", len(DORSALS)), dice.between("fin x", 3, 5), (top - 2).clamp(min=1))
    fin_x = dice.between("belly fin", 5, 8)
    low = (level + high) // 2
    canvas.paint(canvas.box(fin_x, low, fin_x + 1, low) | canvas.box(fin_x + 1, low, fin_x + 2, low + 1), SECOND.mid)
    canvas.shade(body, FIRST, 1)
    _scales(canvas, dice, body, level)
    eye_x = dice.between("eye x", 3, 4)
    eye_y = level // 2 - dice.between("eye y", 1, 2)
    canvas.stamp(FISH_EYES, dice.below("eye", len(FISH_EYES)), eye_x, eye_y)
    mouth = level // 2 + dice.between("mouth", 1, 2)
    canvas.paint(body & canvas.box(1, mouth, 1 + dice.below("lips", 3), mouth), BLACK)
    skin = ramp(dice, "skin", "red gold green blue purple ember ice lime pink steel")
    fins = ramp(dice, "fins", "gold red blue purple ember green ice pink")
    return finish(canvas, dice, skin, fins, ramp(dice, "marks", "ivory bone gold red night ember"))


def _scales(canvas: Canvas, dice: Dice, body: Tensor, level: Tensor) -> None:
    """Bands, a stripe along the side, spots, or a pale belly."""
    kind = dice.below("marks", 5)
    period, phase = dice.between("period", 3, 5), dice.below("phase", 5)
    gill, middle = dice.between("gill", 6, 7), level // 2
    behind = body & canvas.box(gill, 0, 15, 15)
    canvas.paint(canvas.every(period, phase) & behind, THIRD.mid, kind <= 1)
    canvas.paint(canvas.every(period, phase + 1) & behind, THIRD.mid, (kind <= 1) & (period >= 4))
    canvas.paint(behind & canvas.box(0, middle, 15, middle), THIRD.mid, kind == 2)
    canvas.paint(behind & dice.speckle("spots", 6), THIRD.mid, kind == 3)
    canvas.paint(body & canvas.box(0, middle + 2, 15, 15), THIRD.light, kind == 4)
