"""Drawing: every pixel is drawn, the same seed draws the same, and the objective scores only what was hidden."""

from math import inf, nan

import pytest
import torch
from torch import Tensor

from hotloop.apps.sprites.dataset import COLOURS, SIDE
from hotloop.apps.sprites.drawing import draw, guess_hidden, model_classes
from hotloop.apps.sprites.models import Drawer, Size
from hotloop.errors import BadArgument, DoesNotFit


@pytest.fixture
def drawer() -> Drawer:
    torch.manual_seed(0)
    return Drawer(Size(classes=3, width=4)).eval()


@pytest.mark.parametrize("steps", [1, 2, 7, 13])
def test_every_pixel_is_a_colour_or_transparent(drawer: Drawer, steps: int) -> None:
    pixels = draw(drawer, torch.tensor([0, 1, 2]), steps=steps, seed=1)
    assert pixels.shape == (3, SIDE, SIDE)
    assert pixels.dtype == torch.uint8
    assert int(pixels.max()) <= COLOURS


def test_the_same_seed_draws_the_same_and_another_does_not(drawer: Drawer) -> None:
    labels = torch.tensor([0, 1])
    assert torch.equal(draw(drawer, labels, steps=3, seed=5), draw(drawer, labels, steps=3, seed=5))
    assert not torch.equal(draw(drawer, labels, steps=3, seed=5), draw(drawer, labels, steps=3, seed=6))


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


def limited(drawer: Drawer, most: int, seen: list[int]) -> None:
    """Let the drawer run out of memory with more than so many sprites at once."""
    forward = drawer.forward

    def or_not(pixels: Tensor, labels: Tensor) -> Tensor:
        seen.append(len(pixels))
        if len(pixels) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(pixels, labels)

    drawer.forward = or_not  # type: ignore[method-assign]


@pytest.mark.parametrize("most", [2, 5])
def test_fewer_at_once_are_the_same_sprites(drawer: Drawer, most: int) -> None:
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 1])
    whole = draw(drawer, labels, steps=3, seed=5)
    seen: list[int] = []
    limited(drawer, most, seen)
    pieces = draw(drawer, labels, steps=3, seed=5)
    assert max(seen) > most
    assert torch.equal(pieces, whole)


def test_one_sprite_that_does_not_fit(drawer: Drawer) -> None:
    limited(drawer, 0, [])
    with pytest.raises(DoesNotFit, match="a single item does not fit"):
        draw(drawer, torch.tensor([0, 1]), steps=2, seed=1)


@pytest.mark.gpu
def test_drawing_on_a_gpu_that_is_too_small() -> None:
    torch.manual_seed(0)
    wide = Drawer(Size(classes=3, width=64)).eval().cuda()
    labels = torch.arange(1024, device="cuda") % 3
    whole = draw(wide, labels, steps=2, seed=1)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 500 * 2**20) / total)
    try:
        pieces = draw(wide, labels, steps=2, seed=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (pieces == whole).float().mean() > 0.98, "the same random numbers; scores may differ in the last bit"


@pytest.mark.gpu
def test_drawing_on_the_gpu(drawer: Drawer) -> None:
    pixels = draw(drawer.cuda(), torch.tensor([0, 1], device="cuda"), steps=4, seed=1)
    assert pixels.is_cuda
    assert int(pixels.max()) <= COLOURS
