"""Every class: drawn whole, within its margins, in several colours, and hardly ever the same twice."""

import pytest
import torch

from hotloop.apps.sprites.dataset import COLOURS
from hotloop.apps.sprites.dice import Dice
from hotloop.apps.sprites.palette import DUSK, INK, MAROON, PINE
from hotloop.apps.sprites.shapes import DRAWINGS

from ..thorough import tries

COUNT = tries(1000, 2000)
EDGE = torch.ones(16, 16, dtype=torch.bool)
EDGE[1:15, 1:15] = False


@pytest.fixture(scope="module", params=DRAWINGS)
def drawn(request):
    return DRAWINGS[request.param](Dice(1, torch.arange(COUNT), request.param))


def test_pixels_are_palette_indices(drawn):
    assert drawn.shape == (COUNT, 16, 16)
    assert drawn.dtype == torch.uint8
    assert int(drawn.max()) <= COLOURS


def test_there_is_a_figure_in_several_colours(drawn):
    assert int((drawn > 0).flatten(1).sum(1).min()) >= 20
    present = torch.stack([(drawn == colour).flatten(1).any(1) for colour in range(1, COLOURS + 1)], 1)
    assert int(present.sum(1).min()) >= 3


def test_nothing_but_an_outline_reaches_the_edge(drawn):
    touching = set(drawn[:, EDGE].unique().tolist())
    assert touching <= {0, INK, DUSK, MAROON, PINE}


def test_hardly_any_sprite_comes_twice(drawn):
    assert len(drawn.flatten(1).unique(dim=0)) >= 0.97 * COUNT


def test_a_batch_of_one_draws_the_same(drawn, request):
    name = request.node.callspec.params["drawn"]
    assert torch.equal(DRAWINGS[name](Dice(1, torch.tensor([COUNT - 1]), name))[0], drawn[COUNT - 1])
