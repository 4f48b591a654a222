"""The sixteen colours of the sprites that hotloop makes, and the ramps that shade with them."""

from typing import NamedTuple

import torch
from torch import Tensor

from hotloop.apps.sprites.dataset import COLOURS, TRANSPARENT


class Ramp(NamedTuple):
    """One material from its shadow to its light, as palette indices or as roles of a canvas."""

    dark: int
    mid: int
    light: int


INK, DUSK, MAROON, PINE, WOOD, CRIMSON, VIOLET, AZURE = range(1, 9)
LEAF, GOLD, ROSE, SILVER, SKY, LIME, STRAW, WHITE = range(9, 17)

HEX = "1b1428 454684 6f2844 1c5e58 a6603a d4364c 9750cf 3880e4 47ab4e f4a630 f98d98 a6b4d0 7adaf2 b6e354 ffe488 fef8ee"
RGB = tuple(tuple(bytes.fromhex(colour)) for colour in HEX.split())

# Shadows lean towards blue and red, lights towards yellow; neighbours share shades, so that 16 colours do for all.
RAMPS: dict[str, Ramp] = {
    "red": Ramp(MAROON, CRIMSON, ROSE),
    "gold": Ramp(WOOD, GOLD, STRAW),
    "green": Ramp(PINE, LEAF, LIME),
    "blue": Ramp(DUSK, AZURE, SKY),
    "purple": Ramp(DUSK, VIOLET, ROSE),
    "steel": Ramp(DUSK, SILVER, WHITE),
    "wood": Ramp(MAROON, WOOD, GOLD),
    "ember": Ramp(CRIMSON, GOLD, STRAW),
    "ice": Ramp(AZURE, SKY, WHITE),
    "lime": Ramp(LEAF, LIME, STRAW),
    "bone": Ramp(SILVER, WHITE, WHITE),
    "ivory": Ramp(GOLD, STRAW, WHITE),
    "pink": Ramp(VIOLET, ROSE, WHITE),
    "blood": Ramp(INK, MAROON, CRIMSON),
    "night": Ramp(INK, DUSK, VIOLET),
    "teal": Ramp(INK, PINE, LEAF),
}


def palette_tensor(device: str | torch.device = "cpu") -> Tensor:
    """The palette as uint8 (17, 4) RGBA; row 0 is the pixel that is not there.

    >>> palette_tensor()[WHITE].tolist()
    [254, 248, 238, 255]
    """
    table = torch.zeros(COLOURS + 1, 4, dtype=torch.uint8)
    table[TRANSPARENT + 1 :, :3] = torch.tensor(RGB, dtype=torch.uint8)
    table[TRANSPARENT + 1 :, 3] = 255
    return table.to(device)
