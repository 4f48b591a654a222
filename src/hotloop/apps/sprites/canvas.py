"""A batch of 16x16 canvases: integer geometry gives masks, and through them roles (outline, shadow, light) are painted.

A mask is int32 (n, 16): one word per row, bit x for column x, so that one operation treats sixteen pixels. Coordinates
are doubled where a centre may lie between two pixels: pixel p covers 2p to 2p + 2, its middle is 2p + 1, and the middle
of the canvas is 16. Everything is integer arithmetic, the same to the bit on every device.
"""

from functools import cache
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from hotloop.apps.sprites.dataset import SIDE

MIDDLE = SIDE  # in doubled coordinates
FULL = (1 << SIDE) - 1  # a row with every pixel set
PLANES = 4  # bits of a role


class Shades(NamedTuple):
    """The roles of one material, from its shadow to its light."""

    dark: int
    mid: int
    light: int


CLEAR = 0
FIRST, SECOND, THIRD = Shades(1, 2, 3), Shades(4, 5, 6), Shades(7, 8, 9)
OUTLINE, BLACK, BRIGHT, RIM = 10, 11, 12, 13  # RIM is the part of the outline that the light falls on
WATER, FOAM = 14, 15
ROLES = 1 << PLANES
LETTERS = ".123456789#kwr~*"  # how the roles are written in hand-drawn art

Number = int | Tensor  # one for all sprites, or (n,) with one for each
Art = tuple[str, ...]  # drawings of one size, each of them rows of LETTERS


class Canvas:
    """Roles of n sprites, as bit planes int32 (4, n, 16), and the masks that are painted on them, int32 (n, 16)."""

    def __init__(self, count: int, device: str | torch.device = "cpu") -> None:
        self.count = count
        self.device = torch.device(device)
        self.planes = torch.zeros(PLANES, count, SIDE, dtype=torch.int32, device=device)
        self.row = torch.arange(SIDE, dtype=torch.int32, device=device).view(1, SIDE)

    @property
    def drawn(self) -> Tensor:
        """Where anything has been painted."""
        return _any(self.planes)

    def each(self, value: Number) -> Tensor:
        """A number as int32 (n, 1), or (1, 1) where it is one for all."""
        if isinstance(value, Tensor):
            return value.to(torch.int32).view(-1, 1)
        return torch.full((1, 1), value, dtype=torch.int32, device=self.device)

    def only(self, sprites: Tensor) -> Tensor:
        """Every pixel of the sprites that are True in a bool (n,), no pixel of the others."""
        return sprites.view(-1, 1).to(torch.int32) * FULL

    def lines(self, chosen: Tensor) -> Tensor:
        """Every pixel of the rows that are True in a bool (n, 16)."""
        return chosen.to(torch.int32) * FULL

    def every(self, period: Number, phase: Number | Tensor) -> Tensor:
        """Every column x with x + phase divisible by period (1 to 7); a phase (n, 16) is one for each row."""
        if not (isinstance(phase, Tensor) and phase.dim() == 2):
            phase = self.each(phase)
        period = self.each(period)
        return _combs(str(self.device))[(period * 8 + phase % period).long()]

    def box(self, left: Number, top: Number, right: Number, bottom: Number) -> Tensor:
        """A rectangle of whole pixels, by its first and last column and row."""
        inside = (self.row >= self.each(top)) & (self.row <= self.each(bottom))
        return inside * _span(self.each(left), self.each(right))

    def rows(self, half: Tensor, middle: Number | Tensor = MIDDLE) -> Tensor:
        """Rows of these half-widths (doubled; (n, 16) or (1, 16)) about one column, or about one for each row."""
        if not (isinstance(middle, Tensor) and middle.dim() == 2):
            middle = self.each(middle)
        half = half.to(torch.int32)
        return _span((middle - half + 1) >> 1, (middle + half - 2) >> 1)

    def corner(self, total: Number) -> Tensor:
        """The upper left of the canvas, cut off along a diagonal: the pixels whose column and row add up to less."""
        return self.rows(2 * (self.each(total) - self.row).clamp(min=0), 0)

    def columns(self, top: Tensor, bottom: Tensor) -> Tensor:
        """Columns from a first to a last row, (n, 16) each; a column whose last comes before its first is empty."""
        row = self.row.view(1, SIDE, 1)
        return pack((row >= top[:, None, :]) & (row <= bottom[:, None, :]))

    def ellipse(self, x: Number, y: Number, across: Number, down: Number) -> Tensor:
        """The inside of an ellipse with its middle at (x, y) and these half axes; empty where one is not above 0."""
        wide, high = self.each(across), self.each(down)
        room = (wide * high) ** 2 - ((2 * self.row + 1 - self.each(y)) * wide) ** 2
        limit = room.div(high.clamp(min=1) ** 2, rounding_mode="floor")
        reach = _roots(str(self.device))[limit.clamp(0, 1023).long()] + 1
        return self.rows(reach * ((room >= 0) & (wide > 0) & (high > 0)), x)

    def paint(self, mask: Tensor, role: int, only: Tensor | None = None) -> None:
        """Give the pixels of a mask a role; `only`, bool (n,), leaves the other sprites as they are."""
        if only is not None:
            mask = mask & self.only(only)
        keep = ~mask
        for bit in range(PLANES):
            if role >> bit & 1:
                self.planes[bit] |= mask
            else:
                self.planes[bit] &= keep

    def where(self, role: int) -> Tensor:
        """The pixels that have a role."""
        found = self.planes[0] if role & 1 else ~self.planes[0]
        for bit in range(1, PLANES):
            found = found & (self.planes[bit] if role >> bit & 1 else ~self.planes[bit])
        return found & FULL

    def art(self, drawings: Art, which: Number, x: Number, y: Number) -> Tensor:
        """Planes of one drawing for each sprite, its upper left corner at pixel (x, y); what falls outside is cut."""
        sheet, high = _sheet(drawings, str(self.device))
        line = (self.row - self.each(y) + 1).clamp(0, high - 1)  # a clear line lies above and below each drawing
        lines = self.each(which) * high + line
        planes = sheet.index_select(1, lines.view(-1)).view(PLANES, *lines.shape)
        place = self.each(x)
        return (planes << place.clamp(0, SIDE) >> (-place).clamp(0, SIDE)) & FULL

    def stamp(self, drawings: Art, which: Number, x: Number, y: Number, *, only: Tensor | None = None) -> Tensor:
        """Paint one hand-drawn part per sprite over what is there; gives back its mask."""
        return self.overlay(self.art(drawings, which, x, y), only)

    def stamp_pair(self, drawings: Art, which: Number, x: Number, y: Number, *, only: Tensor | None = None) -> Tensor:
        """The same with its mirror image beside it, which lies on top where the two meet."""
        left = self.art(drawings, which, x, y)
        self.overlay(left, only)
        return self.overlay(mirror(left), only) | _any(left)

    def overlay(self, planes: Tensor, only: Tensor | None = None) -> Tensor:
        """Paint the planes of another picture over what is there, where they are not clear."""
        if only is not None:
            planes = planes & self.only(only)
        mask = _any(planes)
        self.planes = (self.planes & ~mask) | planes
        return mask

    def shade(self, mask: Tensor, shades: Shades, deep: int = 1) -> None:
        """Fill a mask with a material lit from the upper left; `deep` is how far the shadow reaches in."""
        self.paint(mask, shades.mid)
        self.paint(mask & ~shift(mask, 1, 1), shades.light)
        self.paint(mask & ~shift(mask, -deep, -deep), shades.dark)

    def outline(self, only: Tensor | None = None) -> None:
        """Draw a line of one pixel around everything, its upper left side as RIM."""
        body = self.drawn
        lower = (shift(body, 1, 0) | shift(body, 0, 1)) & ~body
        upper = (shift(body, -1, 0) | shift(body, 0, -1)) & ~body
        self.paint(upper, RIM, only)
        self.paint(lower, OUTLINE, only)

    def roles(self) -> Tensor:
        """The role of every pixel, uint8 (n, 16, 16)."""
        planes = [unpack(plane).view(torch.uint8) << bit for bit, plane in enumerate(self.planes)]
        return planes[0] | planes[1] | planes[2] | planes[3]

    def colour(self, table: Tensor) -> Tensor:
        """Roles to palette indices through each sprite's own table, uint8 (n, ROLES)."""
        return table.gather(1, self.roles().view(self.count, -1).long()).view(self.count, SIDE, SIDE)


def pack(pixels: Tensor) -> Tensor:
    """Pixels, bool (n, 16, 16), as a mask."""
    places = torch.arange(SIDE, dtype=torch.int32, device=pixels.device)
    return (pixels.to(torch.int32) << places).sum(-1, dtype=torch.int32)


def unpack(mask: Tensor) -> Tensor:
    """A mask as pixels, bool (n, 16, 16)."""
    bits = _bits(str(mask.device))  # a row is looked up as two bytes: far faster than shifting out every bit
    halves = torch.stack([mask & 255, mask >> 8], -1)
    return bits.index_select(0, halves.view(-1)).view(*mask.shape, SIDE)


def select(sprites: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Masks or planes of `one` for the sprites that are True in a bool (n,), of `other` for the rest."""
    return torch.where(sprites.view(-1, 1), one, other)


def shift(mask: Tensor, right: int, down: int) -> Tensor:
    """A mask moved by whole pixels; what comes in from outside is empty."""
    moved = (mask << right) & FULL if right > 0 else mask >> -right
    if down == 0:
        return moved
    edge = torch.zeros_like(moved[:, : abs(down)])
    return torch.cat([edge, moved[:, :-down]] if down > 0 else [moved[:, -down:], edge], 1)


def mirror(mask: Tensor) -> Tensor:
    """Left and right exchanged: neighbours swap places, then pairs, fours and bytes."""
    for step, even in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        mask = ((mask & even) << step) | ((mask >> step) & even)
    return mask


def inner(mask: Tensor) -> Tensor:
    """A mask without its outermost pixels."""
    return mask & shift(mask, 1, 0) & shift(mask, -1, 0) & shift(mask, 0, 1) & shift(mask, 0, -1)


def _any(planes: Tensor) -> Tensor:
    return planes[0] | planes[1] | planes[2] | planes[3]


def _span(left: Tensor, right: Tensor) -> Tensor:
    """The bits from one column to another, none where the last comes before the first."""
    one = torch.ones((), dtype=torch.int32, device=left.device)
    return ((one << (right + 1).clamp(0, SIDE)) - (one << left.clamp(0, SIDE))).clamp(min=0)


@cache
def _roots(device: str) -> Tensor:
    return torch.tensor([isqrt(number) for number in range(1024)], dtype=torch.int32).to(device)


@cache
def _bits(device: str) -> Tensor:
    return torch.tensor([[bool(byte >> bit & 1) for bit in range(8)] for byte in range(256)]).to(device)


@cache
def _combs(device: str) -> Tensor:
    """`every` as a table: row period * 8 + phase."""
    words = [0] * 8
    for period in range(1, 8):
        words += [sum(1 << x for x in range(SIDE) if (x + phase) % period == 0) for phase in range(8)]
    return torch.tensor(words, dtype=torch.int32).to(device)


@cache
def _sheet(drawings: Art, device: str) -> tuple[Tensor, int]:
    """Hand-drawn art as planes, int32 (4, lines), and the number of lines per drawing, a clear one at each end."""
    planes: list[list[int]] = [[] for _ in range(PLANES)]
    for drawing in drawings:
        for line in ("", *drawing.split(), ""):
            for bit, plane in enumerate(planes):
                plane.append(sum(1 << x for x, letter in enumerate(line) if LETTERS.index(letter) >> bit & 1))
    return torch.tensor(planes, dtype=torch.int32).to(device), len(drawings[0].split()) + 2


@cache
def profiles(lines: tuple[str, ...], device: str) -> Tensor:
    """Half-widths written as one hexadecimal digit of whole pixels per row, as doubled units (k, 16)."""
    return torch.tensor([[2 * int(digit, 16) for digit in line] for line in lines], dtype=torch.int32).to(device)
