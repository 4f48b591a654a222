"""A batch of 16x16 canvases: integer geometry gives masks, and through them roles (outline, shadow, light) are painted.

A mask is bool (n, 16, 16), or (1, 16, 16) where it is one for all. Coordinates are doubled where a centre may lie
between two pixels: pixel p covers 2p to 2p + 2, its middle is 2p + 1, and the middle of the canvas is 16. Everything is
integer arithmetic, the same to the bit on every device.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from hotloop.apps.sprites.dataset import SIDE
from hotloop.apps.sprites.palette import Ramp

MIDDLE = SIDE  # in doubled coordinates


CLEAR = 0
FIRST, SECOND, THIRD = Ramp(1, 2, 3), Ramp(4, 5, 6), Ramp(7, 8, 9)
OUTLINE, BLACK, BRIGHT, RIM = 10, 11, 12, 13  # RIM is the part of the outline that the light falls on
WATER, FOAM = 14, 15
ROLES = 16
LETTERS = ".123456789#kwr~*"  # how the roles are written in hand-drawn art

Number = int | Tensor  # one for all sprites, or (n,) with one for each, or (n, 16) with one for each row
Art = tuple[str, ...]  # drawings of one size, each of them rows of LETTERS


class Canvas:
    """Roles of n sprites, uint8 (n, 16, 16), and the masks through which they are painted."""

    def __init__(self, count: int, device: str | torch.device = "cpu") -> None:
        self.count = count
        self.device = torch.device(device)
        self.roles = torch.zeros(count, SIDE, SIDE, dtype=torch.uint8, device=device)
        self.row = torch.arange(SIDE, device=device).view(1, SIDE)
        self._x, self._y = self.row.view(1, 1, SIDE), self.row.view(1, SIDE, 1)

    @property
    def drawn(self) -> Tensor:
        """Where anything has been painted."""
        return self.roles != CLEAR

    def every(self, period: Number, phase: Number) -> Tensor:
        """Every column x with x + phase divisible by period."""
        return (self._x + spread(phase)) % spread(period) == 0

    def box(self, left: Number, top: Number, right: Number, bottom: Number) -> Tensor:
        """A rectangle of whole pixels, by its first and last column and row."""
        columns = (self._x >= spread(left)) & (self._x <= spread(right))
        return columns & (self._y >= spread(top)) & (self._y <= spread(bottom))

    def rows(self, half: Tensor, middle: Number = MIDDLE) -> Tensor:
        """Rows of these half-widths (doubled; (n, 16) or (1, 16)) about one column, or about one for each row."""
        return (2 * self._x + 1 - spread(middle)).abs() < spread(half)

    def corner(self, total: Number) -> Tensor:
        """The upper left of the canvas, cut off along a diagonal: the pixels whose column and row add up to less."""
        return self._x + self._y < spread(total)

    def columns(self, top: Tensor, bottom: Tensor) -> Tensor:
        """Columns from a first to a last row, (n, 16) each; a column whose last comes before its first is empty."""
        return (self._y >= top[:, None, :]) & (self._y <= bottom[:, None, :])

    def ellipse(self, x: Number, y: Number, across: Number, down: Number) -> Tensor:
        """The inside of an ellipse with its middle at (x, y) and these half axes; empty where one is not above 0."""
        wide, high = spread(across).clamp(min=0), spread(down).clamp(min=0)
        from_left, from_top = (2 * self._x + 1 - spread(x)) * high, (2 * self._y + 1 - spread(y)) * wide
        return (from_left**2 + from_top**2 <= (wide * high) ** 2) & (wide * high > 0)

    def paint(self, mask: Tensor, role: int, only: Tensor | None = None) -> None:
        """Give the pixels of a mask a role; `only`, bool (n,), leaves the other sprites as they are."""
        self.roles.masked_fill_(mask if only is None else mask & spread(only), role)

    def art(self, drawings: Art, which: Number, x: Number, y: Number) -> Tensor:
        """Roles of one drawing for each sprite, its upper left corner at pixel (x, y); what falls outside is cut."""
        sheet = _sheet(drawings, str(self.device))
        down = (self._y - spread(y) + 1).clamp(0, sheet.shape[1] - 1)  # every drawing has a clear margin
        across = (self._x - spread(x) + 1).clamp(0, sheet.shape[2] - 1)
        return sheet[spread(which), down, across]

    def stamp(self, drawings: Art, which: Number, x: Number, y: Number, *, only: Tensor | None = None) -> Tensor:
        """Paint one hand-drawn part per sprite over what is there; gives back its mask."""
        return self.overlay(self.art(drawings, which, x, y), only)

    def stamp_pair(self, drawings: Art, which: Number, x: Number, y: Number, *, only: Tensor | None = None) -> Tensor:
        """The same with its mirror image beside it, which lies on top where the two meet."""
        left = self.art(drawings, which, x, y)
        return self.overlay(left, only) | self.overlay(mirror(left), only)

    def overlay(self, roles: Tensor, only: Tensor | None = None) -> Tensor:
        """Paint another picture over what is there, where it is not clear."""
        mask = roles != CLEAR
        if only is not None:
            mask = mask & spread(only)
        self.roles = torch.where(mask, roles, self.roles)
        return mask

    def shade(self, mask: Tensor, shades: Ramp, deep: int = 1) -> None:
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

    def colour(self, table: Tensor) -> Tensor:
        """Roles to palette indices through each sprite's own table, uint8 (n, ROLES)."""
        return table.gather(1, self.roles.flatten(1).long()).view(self.count, SIDE, SIDE)


def spread(values: Number) -> Tensor:
    """Numbers or booleans, (n,) or (n, 16), in a shape that goes with pixels (n, 16, 16)."""
    return values.view(len(values), -1, 1) if isinstance(values, Tensor) else torch.tensor(values)


def select(sprites: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Masks or roles of `one` for the sprites that are True in a bool (n,), of `other` for the rest."""
    return torch.where(spread(sprites), one, other)


def shift(mask: Tensor, right: int, down: int) -> Tensor:
    """A mask moved by whole pixels; what comes in from outside is empty."""
    return pad(mask, (right, -right, down, -down))


def mirror(pixels: Tensor) -> Tensor:
    """Left and right exchanged."""
    return pixels.flip(-1)


def inner(mask: Tensor) -> Tensor:
    """A mask without its outermost pixels."""
    return mask & shift(mask, 1, 0) & shift(mask, -1, 0) & shift(mask, 0, 1) & shift(mask, 0, -1)


@cache
def _sheet(drawings: Art, device: str) -> Tensor:
    """Hand-drawn art as roles, uint8 (drawings, lines, columns), with a clear margin around each."""
    roles = [[[LETTERS.index(letter) for letter in line] for line in drawing.split()] for drawing in drawings]
    return pad(torch.tensor(roles, dtype=torch.uint8), (1, 1, 1, 1)).to(device)
