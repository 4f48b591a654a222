"""Pixel operations: each equals the loop over pixels that it replaces, on the CPU and on a GPU."""

import runpy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from hotloop.apps.sprites import pixels as ops
from hotloop.apps.sprites.pixels import (
    contact_sheet,
    dither,
    flip,
    look_up,
    nearest_colour,
    outline,
    rotate,
    shift_hue,
    upscale,
)
from hotloop.errors import BadArgument

from ..thorough import tries

loops = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "pixel_loops.py")))
few = settings(deadline=None, max_examples=tries(20, 60))

sides = st.integers(1, 7)


@st.composite
def sprites(draw: st.DrawFn) -> Tensor:
    shape = (draw(st.integers(1, 3)), draw(sides), draw(sides))
    return torch.from_numpy(draw(arrays(np.uint8, shape, elements=st.integers(0, 16))))


@st.composite
def pictures(draw: st.DrawFn) -> Tensor:
    shape = (draw(st.integers(1, 3)), draw(sides), draw(sides), 4)
    return torch.from_numpy(draw(arrays(np.uint8, shape)))


@st.composite
def palettes(draw: st.DrawFn, rows: int | None = None) -> Tensor:
    palette = torch.from_numpy(draw(arrays(np.uint8, (rows or draw(st.integers(2, 17)), 4))))
    palette[0] = 0
    return palette


mappings = st.permutations(range(17)).map(lambda colours: torch.tensor(colours, dtype=torch.uint8))
colours = st.lists(st.integers(0, 255), min_size=4, max_size=4)
ARGUMENTS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "look_up": (sprites(), palettes(17)),
    "nearest_colour": (pictures(), palettes()),
    "dither": (pictures(), palettes(), st.integers(0, 255)),
    "flip": (sprites(),),
    "rotate": (sprites(), st.integers(-5, 9)),
    "outline": (sprites(), st.integers(1, 255)),
    "shift_hue": (sprites(), mappings),
    "upscale": (sprites(), st.integers(1, 5)),
    "contact_sheet": (pictures(), st.integers(1, 3), st.integers(0, 3), colours),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@few
@given(st.data())
def test_an_operation_gives_what_its_loop_gives(name: str, data: st.DataObject) -> None:
    given = [data.draw(each) for each in ARGUMENTS[name]]
    if name == "contact_sheet":
        given[1] = min(given[1], len(given[0]))
    listed = [each.tolist() if isinstance(each, Tensor) else each for each in given]
    found = getattr(ops, name)(*given)
    assert found.dtype == torch.uint8
    assert found.tolist() == getattr(loops, name)(*listed)


@few
@given(sprites(), st.booleans(), st.data())
def test_some_are_flipped(pixels: Tensor, vertical: bool, data: st.DataObject) -> None:
    flipped = flip(pixels, vertical=vertical)
    assert flipped.tolist() == loops.flip(pixels.tolist(), vertical=vertical)
    which = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(pixels), max_size=len(pixels))))
    assert torch.equal(flip(pixels, which, vertical=vertical), torch.where(which.view(-1, 1, 1), flipped, pixels))


def test_pictures_too_are_flipped_turned_and_enlarged() -> None:
    palette = torch.randint(0, 256, (17, 4), dtype=torch.uint8)
    pixels = torch.randint(0, 17, (5, 6, 6), dtype=torch.uint8)
    which = torch.tensor([0, 1, 0, 1, 1])
    calls: list[Callable[[Tensor], Tensor]] = [
        flip,
        lambda x: flip(x, which, vertical=True),
        rotate,
        lambda x: upscale(x, 3),
    ]
    for call in calls:
        assert torch.equal(call(look_up(pixels, palette)), look_up(call(pixels), palette))


def test_many_pixels_are_compared_in_parts_and_ties_go_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rgba = torch.randint(0, 256, (7, 5, 3, 4), dtype=torch.uint8)
    palette = torch.randint(0, 256, (17, 4), dtype=torch.uint8)
    whole = nearest_colour(rgba, palette)
    monkeypatch.setattr(ops, "_KEYS_ON_CPU", 100)
    assert torch.equal(nearest_colour(rgba, palette), whole)
    palette = torch.tensor([[0, 0, 0, 0], [9, 9, 9, 255], [11, 11, 11, 255], [9, 9, 9, 255]], dtype=torch.uint8)
    assert nearest_colour(torch.tensor([[[[10, 10, 10, 255]]]], dtype=torch.uint8), palette).item() == 1


def test_views_and_odd_offsets_are_fine() -> None:
    storage = torch.randint(0, 256, (1 + 4 * 17,), dtype=torch.uint8)
    palette = storage[1:].view(17, 4)
    pixels = torch.randint(0, 17, (4, 6, 8), dtype=torch.uint8)[:, ::2, 1::3]
    expected = look_up(pixels.clone(), palette.clone())
    assert torch.equal(look_up(pixels, palette), expected)
    strided = expected.transpose(1, 2)
    assert torch.equal(contact_sheet(strided, 2), contact_sheet(strided.contiguous(), 2))
    assert torch.equal(nearest_colour(strided, palette), nearest_colour(strided.contiguous(), palette))


def test_nothing_given_nothing_returned() -> None:
    none, palette = torch.zeros(0, 16, 16, dtype=torch.uint8), torch.zeros(17, 4, dtype=torch.uint8)
    assert nearest_colour(look_up(none, palette), palette).shape == upscale(none, 1).shape == (0, 16, 16)
    assert outline(none, 1).shape == flip(none).shape == rotate(none).shape == none.shape


P, R, C = (torch.zeros(shape, dtype=torch.uint8) for shape in ((2, 4, 3), (2, 4, 3, 4), (17, 4)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: look_up(P.long(), C), r"pixels is int64 \(2, 4, 3\)\n  fix: give uint8 \(n, h, w\)"),
        (lambda: look_up(P, C[:, :3]), r"palette is uint8 \(17, 3\)"),
        (lambda: look_up(P + 20, C), "index 20 in a palette of 17 rows"),
        (lambda: nearest_colour(P, C), r"give uint8 \(n, h, w, 4\)"),
        (lambda: nearest_colour(R, C[:1]), "palette of 1 rows"),
        (lambda: dither(R, C, -1), "strength=-1"),
        (lambda: flip(P[0]), r"give \(n, h, w\)"),
        (lambda: flip(P, torch.zeros(3)), r"which is float32 \(3,\) for 2 sprites"),
        (lambda: outline(P, 0), "colour=0"),
        (lambda: shift_hue(P, torch.arange(17)), "mapping is int64"),
        (lambda: shift_hue(P + 3, torch.arange(3).byte()), "index 3 in a mapping of 3 rows"),
        (lambda: upscale(P, 0), "factor=0"),
        (lambda: contact_sheet(R[:0], 2), "0 images"),
    ],
)
def test_what_cannot_be_meant_is_explained(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        call()


@pytest.mark.gpu
def test_a_gpu_gives_the_same_and_nothing_waits(no_waits: Callable[[], AbstractContextManager[None]]) -> None:
    generator = torch.Generator().manual_seed(0)
    count = 500

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    pixels, rgba, palette = random(0, 17, count, 16, 16), random(0, 256, count, 16, 16, 4), random(0, 256, 17, 4)
    turned = random(0, 2, count).bool()
    calls: dict[str, tuple[Any, ...]] = {
        "look_up": (pixels, palette),
        "nearest_colour": (rgba, palette),
        "dither": (rgba, palette),
        "flip": (pixels, turned),
        "rotate": (pixels, 3),
        "outline": (pixels, 7),
        "shift_hue": (pixels, random(0, 17, 17)),
        "upscale": (pixels, 3),
        "contact_sheet": (rgba, 7, 2, (1, 2, 3, 4)),
    }
    for name, here in calls.items():
        there = [each.cuda() if isinstance(each, Tensor) else each for each in here]
        torch.cuda.synchronize()
        with no_waits():
            found = getattr(ops, name)(*there)
        assert torch.equal(found.cpu(), getattr(ops, name)(*here)), name
