"""Canvas: every vectorised primitive against the same thing said pixel by pixel."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotloop.apps.sprites.canvas import (
    BRIGHT,
    CLEAR,
    FIRST,
    OUTLINE,
    RIM,
    ROLES,
    SECOND,
    Canvas,
    inner,
    mirror,
    pack,
    profiles,
    select,
    shift,
    unpack,
)

WHOLE = range(16)
COORDINATE = st.lists(st.integers(-6, 38), min_size=3, max_size=3)
PIXEL = st.lists(st.integers(-4, 19), min_size=3, max_size=3)
SIZE = st.lists(st.integers(-2, 30), min_size=3, max_size=3)
PICTURE = st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32)


def slowly(rule: Callable[[int, int, int], bool], count: int = 3) -> Tensor:
    """The mask of a rule (sprite, column, row), one pixel after the other."""
    return torch.tensor([[[bool(rule(n, x, y)) for x in WHOLE] for y in WHOLE] for n in range(count)])


def numbers(values: list[int]) -> Tensor:
    return torch.tensor(values)


def words(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).view(2, 16)


def inside(pixels: Tensor, n: int, x: int, y: int) -> bool:
    return 0 <= x < 16 and 0 <= y < 16 and bool(pixels[n, y, x])


@given(PICTURE)
def test_pack_and_unpack_are_inverse(picture):
    assert torch.equal(pack(unpack(words(picture))), words(picture))
    assert unpack(torch.tensor([[1] + [0] * 15]))[0, 0].tolist() == [True] + [False] * 15


@given(COORDINATE, COORDINATE, SIZE, SIZE)
def test_ellipse(xs, ys, wides, highs):
    def rule(n, x, y):
        wide, high = wides[n], highs[n]
        across, down = (2 * x + 1 - xs[n]) * high, (2 * y + 1 - ys[n]) * wide
        return wide > 0 and high > 0 and across**2 + down**2 <= (wide * high) ** 2

    drawn = Canvas(3).ellipse(numbers(xs), numbers(ys), numbers(wides), numbers(highs))
    assert torch.equal(unpack(drawn), slowly(rule))


@given(PIXEL, PIXEL, PIXEL, PIXEL)
def test_box(lefts, tops, rights, bottoms):
    drawn = Canvas(3).box(*(numbers(each) for each in (lefts, tops, rights, bottoms)))
    rule = slowly(lambda n, x, y: lefts[n] <= x <= rights[n] and tops[n] <= y <= bottoms[n])
    assert torch.equal(unpack(drawn), rule)


@given(st.lists(st.integers(-3, 20), min_size=16, max_size=16), st.integers(-4, 36))
def test_rows(halves, middle):
    drawn = Canvas(1).rows(torch.tensor([halves]), middle)
    assert torch.equal(unpack(drawn), slowly(lambda n, x, y: abs(2 * x + 1 - middle) < halves[y], 1))
    each = Canvas(1).rows(torch.tensor([halves]), torch.full((1, 16), middle))
    assert torch.equal(each, drawn)


@given(st.lists(st.integers(-2, 18), min_size=16, max_size=16), st.lists(st.integers(-2, 18), min_size=16, max_size=16))
def test_columns(tops, bottoms):
    drawn = Canvas(1).columns(torch.tensor([tops]), torch.tensor([bottoms]))
    assert torch.equal(unpack(drawn), slowly(lambda n, x, y: tops[x] <= y <= bottoms[x], 1))


@given(st.integers(1, 7), st.integers(0, 30), st.integers(-3, 33))
def test_every_and_corner(period, phase, total):
    canvas = Canvas(1)
    comb = canvas.every(period, phase).expand(1, 16)
    assert torch.equal(unpack(comb), slowly(lambda n, x, y: (x + phase) % period == 0, 1))
    slanted = canvas.every(period, canvas.row + phase)
    assert torch.equal(unpack(slanted), slowly(lambda n, x, y: (x + y + phase) % period == 0, 1))
    assert torch.equal(unpack(canvas.corner(total)), slowly(lambda n, x, y: x + y < total, 1))


@given(PICTURE, st.integers(-5, 5), st.integers(-5, 5))
def test_shift_mirror_and_inner(picture, right, down):
    pixels = unpack(words(picture))
    assert torch.equal(
        unpack(shift(words(picture), right, down)), slowly(lambda n, x, y: inside(pixels, n, x - right, y - down), 2)
    )
    assert torch.equal(unpack(mirror(words(picture))), pixels.flip(-1))
    around = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    core = slowly(lambda n, x, y: all(inside(pixels, n, x + dx, y + dy) for dx, dy in around), 2)
    assert torch.equal(unpack(inner(words(picture))), core)


@given(PICTURE, st.integers(1, ROLES - 1), st.integers(0, ROLES - 1))
def test_paint_and_where(picture, under, over):
    canvas = Canvas(2)
    canvas.paint(torch.full((2, 16), 0xFFFF, dtype=torch.int32), under)
    canvas.paint(words(picture), over, torch.tensor([True, False]))
    pixels = unpack(words(picture))
    pixels[1] = False
    assert torch.equal(canvas.roles(), torch.where(pixels, over, under).to(torch.uint8))
    assert torch.equal(unpack(canvas.where(over)), canvas.roles() == over)
    assert torch.equal(unpack(canvas.drawn), canvas.roles() != CLEAR)


@given(PICTURE)
def test_outline_touches_only_the_neighbours(picture):
    canvas = Canvas(2)
    canvas.paint(words(picture), FIRST.mid)
    canvas.outline(torch.tensor([True, False]))
    pixels, roles = unpack(words(picture)), canvas.roles()
    lower = slowly(lambda n, x, y: inside(pixels, n, x - 1, y) or inside(pixels, n, x, y - 1), 2) & ~pixels
    upper = slowly(lambda n, x, y: inside(pixels, n, x + 1, y) or inside(pixels, n, x, y + 1), 2) & ~pixels & ~lower
    assert torch.equal(roles[0] == OUTLINE, lower[0])
    assert torch.equal(roles[0] == RIM, upper[0])
    assert not ((roles[1] == OUTLINE) | (roles[1] == RIM)).any()


@given(PICTURE, st.integers(1, 2))
def test_shade_is_lit_from_the_upper_left(picture, deep):
    canvas = Canvas(2)
    canvas.shade(words(picture), SECOND, deep)
    pixels, roles = unpack(words(picture)), canvas.roles()
    dark = slowly(lambda n, x, y: not inside(pixels, n, x + deep, y + deep), 2) & pixels
    light = slowly(lambda n, x, y: not inside(pixels, n, x - 1, y - 1), 2) & pixels & ~dark
    assert torch.equal(roles == SECOND.dark, dark)
    assert torch.equal(roles == SECOND.light, light)
    assert torch.equal(roles == SECOND.mid, pixels & ~dark & ~light)


ART = ("12. .3w", "... 9#.")


@given(st.lists(st.integers(0, 1), min_size=3, max_size=3), PIXEL, PIXEL)
def test_stamp(which, xs, ys):
    letters = ".123456789#kwr"
    canvas = Canvas(3)
    mask = canvas.stamp(ART, numbers(which), numbers(xs), numbers(ys))
    for n in range(3):
        lines = ART[which[n]].split()
        expected = torch.zeros(16, 16, dtype=torch.uint8)
        for y, line in enumerate(lines):
            for x, letter in enumerate(line):
                if 0 <= x + xs[n] < 16 and 0 <= y + ys[n] < 16:
                    expected[y + ys[n], x + xs[n]] = letters.index(letter)
        assert torch.equal(canvas.roles()[n], expected)
        assert torch.equal(unpack(mask)[n], expected > 0)


def test_stamp_pair_mirrors_and_overlay_keeps_what_is_clear():
    canvas = Canvas(1)
    canvas.paint(canvas.box(0, 0, 15, 15), BRIGHT)
    canvas.stamp_pair(ART, 0, 2, 3)
    row = canvas.roles()[0, 3].tolist()
    assert (row[2], row[3], row[4], row[13], row[12]) == (FIRST.dark, FIRST.mid, BRIGHT, FIRST.dark, FIRST.mid)


def test_select_and_colour_are_per_sprite():
    one, other = torch.full((2, 16), 1, dtype=torch.int32), torch.full((2, 16), 2, dtype=torch.int32)
    assert select(torch.tensor([True, False]), one, other)[:, 0].tolist() == [1, 2]
    canvas = Canvas(2)
    canvas.paint(canvas.box(0, 0, 15, 15), FIRST.mid)
    table = torch.zeros(2, ROLES, dtype=torch.uint8)
    table[:, FIRST.mid] = torch.tensor([5, 9])
    assert canvas.colour(table)[:, 4, 4].tolist() == [5, 9]


def test_profiles_are_doubled_hexadecimal_digits():
    assert profiles(("0123456789abcdef",), "cpu").tolist() == [list(range(0, 32, 2))]
