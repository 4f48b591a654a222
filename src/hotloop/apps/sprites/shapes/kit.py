"""What every drawing shares: choosing materials, and the finish that outlines and colours a canvas."""

import torch
from torch import Tensor

from hotloop.apps.sprites.canvas import ROLES, Canvas
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.palette import AZURE, DUSK, INK, MAROON, PINE, RAMPS, SKY, WHITE

# For each palette index, the dark colour that outlines it.
OUTLINES = (
    *(0, INK, DUSK, MAROON, PINE, MAROON, MAROON, DUSK, DUSK),
    *(PINE, MAROON, MAROON, DUSK, DUSK, PINE, MAROON, DUSK),
)


def ramp(dice: Dice, name: str, names: str) -> Tensor:
    """One of these ramps for each sprite, (n, 3); a name given twice comes twice as often."""
    return dice.choose(name, [RAMPS[each] for each in names.split()])


def profile(dice: Dice, name: str, lines: tuple[str, ...]) -> Tensor:
    """One of these for each sprite, (n, 16): half-widths in pixels, a hexadecimal digit a row, in doubled units."""
    return dice.choose(name, [[2 * int(digit, 16) for digit in line] for line in lines])


def first_row(half: Tensor) -> Tensor:
    """The first row of a profile that is not empty, (n,)."""
    return (half.cumsum(1) == 0).sum(1)


def at_row(half: Tensor, row: Tensor) -> Tensor:
    """The half-width of each profile at its own row, in whole pixels, (n,)."""
    return half.gather(1, row.long().view(-1, 1)).view(-1) // 2


def finish(
    canvas: Canvas, dice: Dice, first: Tensor, second: Tensor | None = None, third: Tensor | None = None
) -> Tensor:
    """Outline a canvas, but for every twelfth, and give its roles colours."""
    second = first if second is None else second
    third = second if third is None else third
    canvas.outline(~dice.chance("bare", 1, 12))
    style = dice.below("outline", 5)
    own = torch.tensor(OUTLINES, device=dice.device)[first[:, 0]]
    ink = torch.full_like(own, INK)
    table = torch.zeros(dice.count, ROLES, dtype=torch.long, device=dice.device)
    table[:, 1:4], table[:, 4:7], table[:, 7:10] = first, second, third
    table[:, 10] = torch.where(style == 4, own, ink)
    table[:, 11], table[:, 12] = INK, WHITE
    table[:, 13] = torch.where(style >= 3, own, ink)
    table[:, 14], table[:, 15] = AZURE, SKY
    return canvas.colour(table.to(torch.uint8))
