"""The sixteen colours of the sprites that hotloop makes, and the ramps that shade with them."""

from typing import NamedTuple

import torch
from torch import Tensor

from hotloop.apps.sprites.dataset import COLOURS, TRANSPARENT


class Ramp(NamedTuple):
    """One material from its shadow to its light, as palette indices."""

    dark: int
    mid: int
    light: int


INK, DUSK, MAROON, PINE, WOOD, CRIMSON, VIOLET, AZURE = range(1, 9)
LEAF, GOLD, ROSE, SILVER, SKY, LIME, STRAW, WHITE = range(9, 17)

RGB = (
    (0x1B, 0x14, 0x28),
    (0x45, 0x46, 0x84),
    (0x6F, 0x28, 0x44),
    (0x1C, 0x5E, 0x58),
    (0xA6, 0x60, 0x3A),
    (0xD4, 0x36, 0x4C),
    (0x97, 0x50, 0xCF),
    (0x38, 0x80, 0xE4),
    (0x47, 0xAB, 0x4E),
    (0xF4, 0xA6, 0x30),
    (0xF9, 0x8D, 0x98),
    (0xA6, 0xB4, 0xD0),
    (0x7A, 0xDA, 0xF2),
    (0xB6, 0xE3, 0x54),
    (0xFF, 0xE4, 0x88),
    (0xFE, 0xF8, 0xEE),
)

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
