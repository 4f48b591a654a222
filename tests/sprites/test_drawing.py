"""Drawing: every pixel is drawn, the same seed draws the same, and the objective scores only what was hidden."""

import pytest
import torch

from hotloop.errors import BadArgument
from hotloop.sprites.dataset import COLOURS, SIDE
from hotloop.sprites.drawing import draw, guess_hidden, model_classes
from hotloop.sprites.models import Drawer, Size


@pytest.fixture
def drawer() -> Drawer:
    torch.manual_seed(0)
    return Drawer(Size(classes=3, width=4)).eval()


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("guidance", [0.0, 1.5])
def test_every_pixel_is_a_colour_or_transparent(drawer: Drawer, steps: int, guidance: float) -> None:
    pixels = draw(drawer, torch.tensor([0, 1, 2]), steps=steps, guidance=guidance, seed=1)
    assert pixels.shape == (3, SIDE, SIDE)
    assert pixels.dtype == torch.uint8
    assert int(pixels.max()) <= COLOURS


def test_the_same_seed_draws_the_same_and_another_does_not(drawer: Drawer) -> None:
    labels = torch.tensor([0, 1])
    assert torch.equal(draw(drawer, labels, steps=3, seed=5), draw(drawer, labels, steps=3, seed=5))
    assert not torch.equal(draw(drawer, labels, steps=3, seed=5), draw(drawer, labels, steps=3, seed=6))


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": -3}, {"temperature": 0.0}])
def test_what_cannot_be_meant(drawer: Drawer, options: dict[str, float]) -> None:
    with pytest.raises(BadArgument, match="at least 1"):
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
