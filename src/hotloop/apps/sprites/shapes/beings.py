"""Creatures, ghosts, skulls and fish."""

import torch
from torch import Tensor

from hotloop.apps.sprites.canvas import BLACK, FIRST, SECOND, THIRD, Canvas, mirror, shift
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.shapes.kit import at_row, finish, first_row, profile, ramp

LEFT_HALF = 0x00FF
BODIES = (
    "0000355555554000",  # blob
    "0000244444554000",  # pear
    "0000455553344300",  # big head
    "0002344455555500",  # slime
    "0000355443344400",  # bottle
    "0000555555555400",  # block
    "0002344554433300",  # egg
    "0000045566654000",  # pumpkin
)
EARS = (
    ".... .... .... ....",
    "5... 55.. .55. ..22",  # horns
    ".22. 2332 2352 .22.",  # round ears
    ".2.. .22. .252 .222",  # cat ears
    ".6.. ..2. ..2. ...2",  # antennae
    "22.. 252. .252 ..22",  # flopping ears
    "6... 5..6 55.5 .552",  # antlers
    "..5. .55. .552 ..22",  # inward horns
)
ARMS = (
    ".... .... .... ....",
    ".... .222 .2.2 .3..",  # hanging
    "3... .2.. .222 ....",  # raised
    "3.3. .22. ..22 ....",  # claw up
    "..2. .222 2222 .2.2",  # little wing
    ".... ..22 .223 ....",  # stubs
    ".... 2222 .2.2 3.3.",  # claw down
)
FEET = (
    ".222 .222",
    "..22 .332",
    "22.. .333",
    ".2.2 .2.2",
    "..22 ..22",
    "2.22 .2.2",
    "5522 .555",
)
EYES = (
    "........ .ww..ww. .wk..kw. ........",
    "........ .kw..kw. .kk..kk. ........",
    ".ww..ww. .wk..wk. .ww..ww. ........",
    "...ww... ..wkkw.. ..wkkw.. ...ww...",  # one eye
    "...ww... ..wwkw.. ..wkkw.. ........",
    "...ww... .w.wk.w. .k....k. ........",  # three eyes
    "1......1 .11..11. .wk..kw. ........",  # angry
    "........ .k....k. .k....k. ........",
    ".www.www .wkw.wkw .www.www ........",
    "........ .k.kk.k. k......k ........",
    "ww....ww wk....kw ww....ww ........",  # far apart
    "...11... .ww11ww. .kw..wk. ........",
)
MOUTHS = (
    "........ ...kk... ........",
    "..k..k.. ...kk... ........",
    ".kkkkkk. .kwkkwk. ..kkkk..",
    ".kkkkkk. ..w..w.. ........",
    "..kkkk.. ..wwww.. ..kkkk..",
    "...kk... ...kk... ........",
    ".k....k. ..kkkk.. ...88...",
    "..kkkk.. ..k88k.. ...kk...",
    ".kwkwkw. .wkwkwk. ........",
    "........ ..kkkk.. ........",
)


def creature(dice: Dice) -> Tensor:
    """A little monster: a body with ears or horns, arms, feet and a face."""
    canvas = Canvas(dice.count, dice.device)
    half = profile(dice, "body", BODIES)
    half = (half + 2 * dice.between("fat", -1, 1)[:, None] * (half > 2)).clamp(0, 12)
    top = first_row(half)
    shoulder = dice.between("shoulder", 7, 9)
    wide, crown = at_row(half, shoulder), at_row(half, top)
    canvas.stamp_pair(EARS, dice.below("ears", len(EARS)), (5 - crown).clamp(min=1), (top - 3).clamp(min=1))
    arms = dice.below("arms", len(ARMS)) * (wide <= 5)
    canvas.stamp_pair(ARMS, arms, (5 - wide).clamp(min=1), shoulder - 1)
    canvas.stamp_pair(FEET, dice.below("feet", len(FEET)), dice.between("stance", 3, 4), 13)
    body = canvas.rows(half)
    canvas.shade(body, FIRST, 2)
    _belly(canvas, dice, body)
    face = top + dice.between("face", 1, 2)
    canvas.stamp(EYES, dice.below("eyes", len(EYES)), 4, face)
    canvas.stamp(MOUTHS, dice.below("mouth", len(MOUTHS)), 4, face + dice.between("mouth row", 3, 4))
    skin = ramp(dice, "skin", "red", "green", "blue", "purple", "gold", "ice", "lime", "pink", "ember", "wood")
    horn = ramp(dice, "horn", "ivory", "gold", "bone", "red", "lime", "ice", "pink")
    return finish(canvas, dice, skin, horn, ramp(dice, "tongue", "red", "pink", "red"))


def _belly(canvas: Canvas, dice: Dice, body: Tensor) -> None:
    """A pale belly, spots or stripes, or plain skin."""
    kind = dice.below("belly", 5)
    patch = canvas.ellipse(16, 24, dice.between("belly width", 4, 8), dice.between("belly height", 4, 8))
    canvas.paint(patch & body, SECOND.light, kind <= 1)
    spots = dice.speckle("spots", 5) & LEFT_HALF
    canvas.paint((spots | mirror(spots)) & body, FIRST.dark, kind == 2)
    stripes = canvas.lines((canvas.row + canvas.each(dice.below("stripe phase", 3))) % 3 == 0)
    canvas.paint(stripes & body & shift(body, 2, 0) & shift(body, -2, 0), FIRST.dark, kind == 3)


GHOST_EYES = (
    ".kk..kk. .kk..kk. ........",
    ".kk..kk. .kk..kk. .kk..kk.",
    ".kw..kw. .kk..kk. ........",
    "..k..k.. ..k..k.. ........",
    "k......k .kk..kk. .kk..kk.",
    ".kk..kk. .wk..wk. .kk..kk.",
    ".kkk.kkk .kwk.kwk ........",
    "........ .k.k.k.k ..k...k.",
    ".k....k. k.k..k.k ........",
)
GHOST_MOUTHS = (
    "........ ........ ........",
    "...kk... ...kk... ........",
    "..k..k.. ...kk... ........",
    "..kkkk.. ..k88k.. ...kk...",
    "...kk... ..kkkk.. ..kkkk..",
    ".k.k.k.. ..k.k.k. ........",
    "..kkkk.. ...w.... ........",
    "........ ..kkkk.. ........",
)
HATS = (
    "..k..... .kk..... .kkk.... k55kk... kkkkkkk.",  # witch
    "........ ..kkkk.. ..kkkk.. ..5555.. .kkkkkk.",  # top hat
    "........ 5...5... 5.5.5.5. 5555555. 6565656.",  # crown
    "........ ........ 55...55. 5655565. 55...55.",  # bow
    "..666... .6...6.. ..666... ........ ........",  # halo
)
WAVES = ((0, 0, 1, 1), (0, 1, 2, 1), (0, 0, 0, 2), (0, 2, 0, 2), (1, 0, 0, 1), (0, 1, 1, 2))


def ghost(dice: Dice) -> Tensor:
    """A floating sheet: a dome that ends in waves, with a face, sometimes a hat."""
    canvas = Canvas(dice.count, dice.device)
    hat = dice.below("hat", 12)
    top = dice.between("top", 1, 2) + 2 * ((hat < 3) | (hat == 4))
    wide = dice.between("width", 9, 12)
    sway = dice.between("sway", -2, 2)
    low = (canvas.row - 9).clamp(0)
    middle = 16 + low * sway[:, None] * 2 // 3
    dome = canvas.ellipse(16, 2 * top + wide, wide, wide)
    half = torch.where(canvas.row * 2 > (2 * top + wide)[:, None], wide[:, None], 0)
    flare = dice.below("flare", 2)
    half = half + low.clamp(0, 2) * flare[:, None]
    sheet = dome | canvas.rows(half, middle)
    wave = dice.choose("wave", WAVES)
    phase = (canvas.row + dice.below("phase", 4)[:, None]) % 4
    hem = dice.between("hem", 13, 14)[:, None] - wave.gather(1, phase)
    sheet = sheet & canvas.columns(torch.zeros_like(hem), hem) & canvas.box(1, 1, 14, 14)
    arm_row = dice.between("arm row", 16, 20)
    arms = canvas.ellipse(16 - wide, arm_row, 3, 3) | canvas.ellipse(16 + wide, arm_row - 2 * sway, 3, 3)
    armed = canvas.only(dice.chance("arms", 1, 2))
    sheet = sheet | (arms & armed & canvas.box(1, 1, 14, 14))
    canvas.shade(sheet, FIRST, 2)
    face = top + dice.between("face", 2, 4)
    gaze = dice.between("gaze", 3, 5)
    canvas.stamp(GHOST_EYES, dice.below("eyes", len(GHOST_EYES)), gaze, face)
    canvas.stamp(GHOST_MOUTHS, dice.below("mouth", len(GHOST_MOUTHS)), gaze, face + 3)
    blush = dice.chance("blush", 1, 3)
    for side in (0, 7):
        cheek = canvas.box(gaze + side, face + 3, gaze + side, face + 3)
        canvas.paint(cheek & sheet, THIRD.light, blush)
    hat_row = torch.where(hat == 3, top - 2, torch.where(hat == 4, 1, (top - 4).clamp(min=0)))
    canvas.stamp(HATS, hat.clamp(max=4), 4, hat_row, only=hat < 5)
    cloth = ramp(dice, "cloth", "bone", "bone", "steel", "ice", "pink", "lime", "ivory", "purple")
    return finish(canvas, dice, cloth, ramp(dice, "trim", "gold", "red", "purple", "blue"), ramp(dice, "b", "red"))


SOCKETS = (
    "..kk .kkk .kkk",
    ".kk. .kkk .kkk",
    ".kkk .kkk .kkk",
    ".kkk .kkk ..kk",
    ".k.. .kkk .kkk",
    ".kkk .kkk .kk.",
    "..k. .kkk ..k.",
    ".... .kkk .kkk",
    ".kk. kkkk .kk.",
    "kkk. kkkk .kkk",
    "kkkk kkkk .kk.",
    ".kkk kkkk kkk.",
    "k... kkkk .kkk",
)
NARROW = 8  # the sockets that fit a narrow skull
NOSES = ("kk kk", ".. kk", "kk ..", "k. .k", "kk kk")
CRACKS = (
    "..... ..... ..... .....",
    "..1.. .1... ..1.. .....",
    "1.... .1... .1... ..1..",
    "...1. ..1.. .11.. 1....",
    "..11. .1..1 1.... .....",
)
TOPS = (
    "5......5 55....55 .55..55. ..5..5..",  # horns
    "5..55..5 55.55.55 56566565 55555555",  # crown
    "...6.... ..66.6.. .56656.. .555556.",  # flame
    "......8. .....888 ....8888 .......8",  # plume
)


def skull(dice: Dice) -> Tensor:
    """A skull from the front: cranium, sockets, nose and a row of teeth."""
    canvas = Canvas(dice.count, dice.device)
    topped = dice.below("top", 10)
    wide, high = dice.between("width", 5, 6), dice.between("height", 9, 10)
    top = torch.where(topped < 4, 4, dice.between("crown", 1, 3))
    level = 2 * top + high
    cranium = canvas.ellipse(16, level, 2 * wide + 1, high)
    eyes = top + dice.between("eye row", 3, 4)
    cheeks = canvas.box(8 - wide, eyes, 7 + wide, eyes + dice.between("cheek", 2, 3))
    jaw_half, jaw_end = dice.between("jaw", 3, 4), (eyes + dice.between("chin", 6, 7)).clamp(max=14)
    jaw = canvas.box(8 - jaw_half, eyes + 3, 7 + jaw_half, jaw_end)
    canvas.shade(cranium | cheeks | jaw, FIRST, 1)
    _teeth(canvas, dice, jaw, jaw_end)
    narrow = dice.below("narrow sockets", NARROW)
    socket = canvas.stamp_pair(SOCKETS, torch.where(wide == 5, narrow, dice.below("sockets", len(SOCKETS))), 3, eyes)
    spark_x, spark_y = dice.between("spark x", 4, 6), eyes + dice.between("spark y", 0, 1)
    spark = canvas.box(spark_x, spark_y, spark_x + dice.below("spark wide", 2), spark_y + dice.below("spark high", 2))
    canvas.paint((spark | mirror(spark)) & socket, THIRD.mid, dice.chance("glow", 2, 5))
    canvas.stamp(NOSES, dice.below("nose", len(NOSES)), 7, eyes + 3)
    canvas.stamp(CRACKS, dice.below("crack", len(CRACKS)), dice.between("crack x", 4, 8), top + 1, only=topped > 3)
    canvas.stamp(TOPS, topped.clamp(max=3), 4, 1, only=topped < 4)
    bone = ramp(dice, "bone", "bone", "bone", "bone", "steel", "ivory", "ivory", "lime", "ice", "gold")
    metal = ramp(dice, "metal", "gold", "wood", "ember", "gold")
    return finish(canvas, dice, bone, metal, ramp(dice, "glow", "red", "ember", "lime", "ice", "purple"))


def _teeth(canvas: Canvas, dice: Dice, jaw: Tensor, jaw_end: Tensor) -> None:
    """Gaps between the teeth, a line above them, and sometimes one that is missing."""
    style = dice.choose("teeth", (0, 1, 1, 2))
    gum = jaw_end - dice.between("tooth", 1, 2)
    odd = canvas.every(2, dice.below("tooth phase", 2))
    band = jaw & canvas.box(0, gum + 1, 15, jaw_end)
    canvas.paint(band & odd, BLACK, style <= 1)
    canvas.paint(jaw & canvas.box(0, gum, 15, gum), FIRST.dark, style >= 1)
    canvas.paint(band & odd & canvas.box(0, gum + 1, 15, gum + 1), BLACK, style == 2)
    lost = dice.between("lost", 5, 10)
    canvas.paint(band & canvas.box(lost, 0, lost, 15), BLACK, dice.chance("gap", 1, 2))


TAILS = (
    "...55 ..556 .5566 .556. .5566 ..556 ...55",
    "..... ...55 .5556 .5565 .5556 ...55 .....",
    "....5 ..555 .5565 ..55. .5565 ..555 ....5",
    "..55. .5565 .5656 .5565 .5656 .5565 ..55.",
    "....5 ...55 .5565 .5565 ..556 ...55 ....5",
)
DORSALS = (
    "........ ...555.. ..55555.",
    "....5... ...555.. ..55555.",
    "..5.5.5. ..55555. .555555.",
    ".....55. ...5555. .555555.",
    "........ ........ ..5555..",
    ".5...... .555.... .555555.",
)
FISH_EYES = ("ww wk", "wk ww", "kw kk", "wk wk", "ww kw", "6k 66")


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
    skin = ramp(dice, "skin", "red", "gold", "green", "blue", "purple", "ember", "ice", "lime", "pink", "steel")
    fins = ramp(dice, "fins", "gold", "red", "blue", "purple", "ember", "green", "ice", "pink")
    return finish(canvas, dice, skin, fins, ramp(dice, "marks", "ivory", "bone", "gold", "red", "night", "ember"))


def _scales(canvas: Canvas, dice: Dice, body: Tensor, level: Tensor) -> None:
    """Bands, a stripe along the side, spots, a net of scales, or a pale belly."""
    kind = dice.below("marks", 6)
    period, phase = dice.between("period", 3, 5), dice.below("phase", 5)
    gill, middle = dice.between("gill", 6, 7), level // 2
    behind = body & canvas.box(gill, 0, 15, 15)
    canvas.paint(canvas.every(period, phase) & behind, THIRD.mid, kind <= 1)
    canvas.paint(canvas.every(period, phase + 1) & behind, THIRD.mid, (kind <= 1) & (period >= 4))
    canvas.paint(behind & canvas.box(0, middle, 15, middle), THIRD.mid, kind == 2)
    canvas.paint(behind & dice.speckle("spots", 6), THIRD.mid, kind == 3)
    net = canvas.every(2, phase) & canvas.lines(canvas.row % 2 == 0)
    canvas.paint(behind & net & shift(body, -1, -1), FIRST.light, kind == 4)
    canvas.paint(body & canvas.box(0, middle + 2, 15, 15), THIRD.light, kind == 5)
    canvas.paint(body & canvas.box(gill, middle - 1, gill, middle + 1), FIRST.dark, dice.chance("gill line", 2, 3))
