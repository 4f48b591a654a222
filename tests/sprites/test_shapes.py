"""Every class: drawn whole, within its margins, in several colours, and hardly ever the same twice."""

import pytest
import torch

from hotloop.apps.sprites.dataset import COLOURS
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.palette import DUSK, INK, MAROON, PINE, RAMPS, RGB
from hotloop.apps.sprites.shapes import DRAWINGS

from ..thorough import tries

COUNT = tries(1000, 2000)
EDGE = torch.ones(16, 16, dtype=torch.bool)
EDGE[1:15, 1:15] = False


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing(name):
    drawn = DRAWINGS[name](Dice(1, torch.arange(COUNT), name))
    assert (drawn.shape, drawn.dtype) == ((COUNT, 16, 16), torch.uint8)
    assert int(drawn.max()) <= COLOURS
    assert int((drawn > 0).flatten(1).sum(1).min()) >= 20, "there is a figure"
    present = torch.stack([(drawn == colour).flatten(1).any(1) for colour in range(1, COLOURS + 1)], 1)
    assert int(present.sum(1).min()) >= 3, "in several colours"
    assert set(drawn[:, EDGE].unique().tolist()) <= {0, INK, DUSK, MAROON, PINE}, "nothing but an outline at the edge"
    assert len(drawn.flatten(1).unique(dim=0)) >= 0.97 * COUNT, "hardly any comes twice"
    assert torch.equal(DRAWINGS[name](Dice(1, torch.tensor([COUNT - 1]), name))[0], drawn[COUNT - 1])


def test_the_colours_are_distinct_and_ramps_go_from_dark_to_light():
    assert len(set(RGB)) == COLOURS
    luminance = [0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue in RGB]
    for name, ramp in RAMPS.items():
        dark, mid, light = (luminance[colour - 1] for colour in ramp)
        assert dark < mid <= light, name
