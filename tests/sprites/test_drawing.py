"""Drawing: every pixel is drawn, the same seed draws the same, and the objective scores only what was hidden."""

from math import inf, nan

import pytest
import torch

from hotloop.apps.sprites.dataset import COLOURS, SIDE
from hotloop.apps.sprites.drawing import draw, guess_hidden, model_classes
from hotloop.apps.sprites.models import Drawer, Size
from hotloop.errors import BadArgument


@pytest.fixture
def drawer() -> Drawer:
    torch.manual_seed(0)
    return Drawer(Size(classes=3, width=4)).eval()


@pytest.mark.parametrize("steps", [1, 13])
def test_every_pixel_is_a_colour_and_a_seed_draws_the_same(drawer: Drawer, steps: int) -> None:
    first, again, other = (draw(drawer, torch.tensor([0, 1, 2]), steps=steps, seed=seed) for seed in (5, 5, 6))
    assert (first.shape, first.dtype) == ((3, SIDE, SIDE), torch.uint8)
    assert int(first.max()) <= COLOURS
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": -3}, {"steps": 257}, *({"temperature": t} for t in (0.0, -1.0, 1e9, nan, inf))]
)
def test_what_cannot_be_meant(drawer: Drawer, options: dict[str, float]) -> None:
    with pytest.raises(BadArgument, match=r"fix: choose from \d"):
        draw(drawer, torch.tensor([0]), **options)  # type: ignore[arg-type]


def test_the_objective_falls_when_the_guesses_are_right(drawer: Drawer) -> None:
    pixels = torch.full((4, SIDE, SIDE), 7, dtype=torch.uint8)
    batch = (pixels, torch.zeros(4, dtype=torch.long))
    before = guess_hidden(drawer, batch).item()
    with torch.no_grad():
        drawer.head[-1].bias[7] += 50
    assert guess_hidden(drawer, batch).item() < 1e-6 < before


def test_a_wrapped_model_still_tells_its_classes(drawer: Drawer) -> None:
    assert model_classes(torch.nn.DataParallel(drawer)) == 3


@pytest.mark.gpu
def test_drawing_on_the_gpu(drawer: Drawer) -> None:
    pixels = draw(drawer.cuda(), torch.tensor([0, 1], device="cuda"), steps=4, seed=1)
    assert pixels.is_cuda
    assert int(pixels.max()) <= COLOURS
