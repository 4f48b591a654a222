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
    rotate_ramps,
    shift_hue,
    upscale,
)
from hotloop.errors import BadArgument

from ..thorough import tries

loops = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "pixel_loops.py")))
few = settings(deadline=None, max_examples=tries(20, 60))

sides = st.integers(1, 7)


@st.composite
def sprites(draw: st.DrawFn, *, square: bool = False) -> Tensor:
    height = draw(sides)
    shape = (draw(st.integers(1, 3)), height, height if square else draw(sides))
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


def same(found: Tensor, expected: list[Any]) -> bool:
    return found.dtype == torch.uint8 and found.tolist() == expected


@few
@given(sprites(), palettes(17))
def test_look_up(pixels: Tensor, palette: Tensor) -> None:
    assert same(look_up(pixels, palette), loops.look_up(pixels.tolist(), palette.tolist()))


@few
@given(pictures(), palettes())
def test_nearest_colour(rgba: Tensor, palette: Tensor) -> None:
    assert same(nearest_colour(rgba, palette), loops.nearest_colour(rgba.tolist(), palette.tolist()))


@few
@given(pictures(), palettes(), st.integers(0, 255))
def test_dither(rgba: Tensor, palette: Tensor, strength: int) -> None:
    assert same(dither(rgba, palette, strength), loops.dither(rgba.tolist(), palette.tolist(), strength))


@few
@given(sprites(), st.booleans(), st.data())
def test_flip(pixels: Tensor, vertical: bool, data: st.DataObject) -> None:
    flipped = loops.flip(pixels.tolist(), vertical=vertical)
    assert same(flip(pixels, vertical=vertical), flipped)
    which = data.draw(st.lists(st.booleans(), min_size=len(pixels), max_size=len(pixels)))
    expected = [after if yes else before for yes, before, after in zip(which, pixels.tolist(), flipped, strict=True)]
    assert same(flip(pixels, torch.tensor(which), vertical=vertical), expected)
    assert torch.equal(flip(flip(pixels, vertical=vertical), vertical=vertical), pixels)


@few
@given(sprites(), st.integers(-5, 9))
def test_rotate(pixels: Tensor, turns: int) -> None:
    assert same(rotate(pixels, turns), loops.rotate(pixels.tolist(), turns))
    assert torch.equal(rotate(rotate(pixels, turns), -turns), pixels)
    assert torch.equal(rotate(rotate(rotate(rotate(pixels)))), pixels)


@few
@given(sprites(square=True), st.data())
def test_rotate_each_by_its_own(pixels: Tensor, data: st.DataObject) -> None:
    turns = data.draw(st.lists(st.integers(-5, 9), min_size=len(pixels), max_size=len(pixels)))
    expected = [loops.rotate([sprite], turn)[0] for sprite, turn in zip(pixels.tolist(), turns, strict=True)]
    assert same(rotate(pixels, torch.tensor(turns)), expected)


@few
@given(sprites(), st.integers(1, 255))
def test_outline(pixels: Tensor, colour: int) -> None:
    pixels[:, ::2] = 0  # something to outline
    drawn = outline(pixels, colour)
    assert same(drawn, loops.outline(pixels.tolist(), colour))
    assert torch.equal(drawn[pixels > 0], pixels[pixels > 0]), "what was there stays"
    each = torch.arange(colour, colour + len(pixels)).clamp(max=255)
    for number, own in enumerate(each.tolist()):
        assert torch.equal(outline(pixels, each)[number], outline(pixels, own)[number])


@few
@given(sprites(), st.data())
def test_shift_hue(pixels: Tensor, data: st.DataObject) -> None:
    tables = torch.tensor([data.draw(st.permutations(range(17))) for _ in pixels], dtype=torch.uint8)
    for_all = shift_hue(pixels, tables[0])
    assert same(for_all, loops.shift_hue(pixels.tolist(), tables[0].tolist()))
    assert torch.equal(shift_hue(for_all, tables[0].argsort().to(torch.uint8)), pixels), "the way back"
    each = [loops.shift_hue([s], t)[0] for s, t in zip(pixels.tolist(), tables.tolist(), strict=True)]
    assert same(shift_hue(pixels, tables), each)


@few
@given(sprites(), st.integers(1, 5))
def test_upscale(pixels: Tensor, factor: int) -> None:
    large = upscale(pixels, factor)
    assert same(large, loops.upscale(pixels.tolist(), factor))
    assert torch.equal(large[:, ::factor, ::factor], pixels)


@few
@given(pictures(), st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 255), min_size=4, max_size=4))
def test_contact_sheet(images: Tensor, columns: int, gap: int, background: list[int]) -> None:
    columns = min(columns, len(images))
    expected = loops.contact_sheet(images.tolist(), columns, gap, background)
    assert same(contact_sheet(images, columns, gap, background), expected)


@few
@given(sprites(), st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=16, max_size=16, unique=True))
def test_the_nearest_of_palette_colours_is_itself(pixels: Tensor, colours: list[tuple[int, int, int]]) -> None:
    palette = torch.tensor([[0, 0, 0, 0], *([*colour, 255] for colour in colours)], dtype=torch.uint8)
    assert torch.equal(nearest_colour(look_up(pixels, palette), palette), pixels)


@few
@given(pictures(), palettes())
def test_a_second_reduction_changes_nothing(rgba: Tensor, palette: Tensor) -> None:
    palette[1:, 3] = 255
    once = look_up(nearest_colour(rgba, palette), palette)
    assert torch.equal(look_up(nearest_colour(once, palette), palette), once)
    assert torch.equal(dither(rgba, palette, 0), nearest_colour(rgba, palette))


def test_pictures_too_are_flipped_turned_and_enlarged() -> None:
    palette = torch.randint(0, 256, (17, 4), dtype=torch.uint8)
    pixels = torch.randint(0, 17, (5, 6, 6), dtype=torch.uint8)
    which = torch.tensor([0, 1, 0, 1, 1])
    calls: list[Callable[[Tensor], Tensor]] = [
        flip,
        lambda x: flip(x, which, vertical=True),
        rotate,
        lambda x: rotate(x, which + 2),
        lambda x: upscale(x, 3),
    ]
    for call in calls:
        assert torch.equal(call(look_up(pixels, palette)), look_up(call(pixels), palette))


def test_many_pixels_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rgba = torch.randint(0, 256, (7, 5, 3, 4), dtype=torch.uint8)
    palette = torch.randint(0, 256, (17, 4), dtype=torch.uint8)
    whole = nearest_colour(rgba, palette)
    monkeypatch.setattr(ops, "_KEYS_ON_CPU", 100)
    assert torch.equal(nearest_colour(rgba, palette), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_around_it_changes_nothing(dtype: torch.dtype) -> None:
    rgba = torch.randint(0, 256, (4, 16, 16, 4), dtype=torch.uint8)
    palette = torch.randint(0, 256, (17, 4), dtype=torch.uint8)
    with torch.autocast("cpu", dtype=dtype):
        inside = dither(rgba, palette)
    assert torch.equal(inside, dither(rgba, palette))


def test_ties_go_to_the_first() -> None:
    palette = torch.tensor([[0, 0, 0, 0], [9, 9, 9, 255], [11, 11, 11, 255], [9, 9, 9, 255]], dtype=torch.uint8)
    assert nearest_colour(torch.tensor([[[[10, 10, 10, 255]]]], dtype=torch.uint8), palette).item() == 1


def test_dithering_mixes_two_colours_evenly() -> None:
    palette = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 255], [255, 255, 255, 255]], dtype=torch.uint8)
    for level, expected in ((64, 0.25), (128, 0.5), (192, 0.75)):
        rgba = torch.full((1, 16, 16, 4), level, dtype=torch.uint8)
        rgba[..., 3] = 255
        light = (dither(rgba, palette, 255) == 2).float().mean().item()
        assert light == pytest.approx(expected, abs=0.07)


def test_views_and_odd_offsets_are_fine() -> None:
    storage = torch.randint(0, 256, (1 + 4 * 17,), dtype=torch.uint8)
    palette = storage[1:].view(17, 4)
    pixels = torch.randint(0, 17, (4, 6, 8), dtype=torch.uint8)[:, ::2, 1::3]
    expected = look_up(pixels.clone(), palette.clone())
    assert torch.equal(look_up(pixels, palette), expected)
    strided = expected.transpose(1, 2)
    assert torch.equal(contact_sheet(strided), contact_sheet(strided.contiguous()))
    assert torch.equal(nearest_colour(strided, palette), nearest_colour(strided.contiguous(), palette))


def test_nothing_given_nothing_returned() -> None:
    none, palette = torch.zeros(0, 16, 16, dtype=torch.uint8), torch.zeros(17, 4, dtype=torch.uint8)
    assert look_up(none, palette).shape == (0, 16, 16, 4)
    assert nearest_colour(look_up(none, palette), palette).shape == (0, 16, 16)
    assert outline(none, 1).shape == flip(none).shape == rotate(none).shape == none.shape
    assert upscale(none, 2).shape == (0, 32, 32)
    assert shift_hue(none, torch.arange(17).byte()).shape == none.shape


def test_a_sheet_is_about_square() -> None:
    assert contact_sheet(torch.zeros(100, 16, 16, 4, dtype=torch.uint8), gap=0).shape == (160, 160, 4)
    assert contact_sheet(torch.zeros(1, 16, 16, 4, dtype=torch.uint8), columns=9, gap=2).shape == (20, 20, 4)


def test_ramps_change_places_and_the_rest_stays() -> None:
    mapping = rotate_ramps([[1, 2, 3], [7, 8, 9], [4, 5, 6]], steps=2)
    assert mapping.tolist() == [0, 4, 5, 6, 7, 8, 9, 1, 2, 3, 10, 11, 12, 13, 14, 15, 16]
    assert sorted(mapping.tolist()) == list(range(17))
    assert rotate_ramps([[1, 2], [3, 4]], steps=2).tolist() == list(range(17))
    assert rotate_ramps([]).tolist() == list(range(17))


P, R, C = (
    torch.zeros(2, 4, 3, dtype=torch.uint8),
    torch.zeros(2, 4, 3, 4, dtype=torch.uint8),
    torch.zeros(17, 4, dtype=torch.uint8),
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: look_up(P.long(), C), r"pixels is int64 \(2, 4, 3\)\n  fix: give uint8 \(n, h, w\)"),
        (lambda: look_up(P[0], C), r"pixels is uint8 \(4, 3\)"),
        (lambda: look_up(P, C[:, :3]), r"palette is uint8 \(17, 3\)"),
        (lambda: look_up(P + 20, C), "index 20 in a palette of 17 rows"),
        (lambda: nearest_colour(P, C), r"give uint8 \(n, h, w, 4\)"),
        (lambda: nearest_colour(R, C[:1]), "palette of 1 rows"),
        (lambda: nearest_colour(R, C.repeat(16, 1)), "palette of 272 rows"),
        (lambda: dither(R, C, -1), "strength=-1"),
        (lambda: dither(R, C, 256), "strength=256"),
        (lambda: flip(P[0]), r"give \(n, h, w\)"),
        (lambda: flip(P, torch.zeros(3)), r"which is bool \(3,\) for 2 sprites"),
        (lambda: rotate(P, torch.zeros(2, dtype=torch.int64)), "must be square"),
        (lambda: rotate(R[:, :3], torch.zeros(5, dtype=torch.int64)), "one value for each sprite"),
        (lambda: outline(P, 0), "colour=0"),
        (lambda: outline(P, 256), "colour=256"),
        (lambda: outline(P, torch.ones(1)), "one value for each"),
        (lambda: shift_hue(P, torch.arange(17)), "mapping of int64"),
        (lambda: shift_hue(P, C[:, :3].T.contiguous()), "3 mappings for 2 sprites"),
        (lambda: shift_hue(P + 3, torch.arange(3).byte()), "index 3 in a mapping of 3 rows"),
        (lambda: rotate_ramps([[1, 2], [3]]), "equally long"),
        (lambda: rotate_ramps([[1, 2], [2, 3]]), "no index twice"),
        (lambda: rotate_ramps([[0, 1]]), "1 to 16"),
        (lambda: rotate_ramps([[16, 17]]), "1 to 16"),
        (lambda: upscale(P, 0), "factor=0"),
        (lambda: contact_sheet(R[:0]), "0 images"),
        (lambda: contact_sheet(R, gap=-1), "gap=-1"),
        (lambda: contact_sheet(R, background=(0, 0, 256, 0)), "background"),
        (lambda: contact_sheet(R, background=(0, 0, 0)), "background"),
    ],
)
def test_what_cannot_be_meant_is_explained(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        call()


def test_columns_that_cannot_be_meant() -> None:
    with pytest.raises(BadArgument, match="columns=0"):
        contact_sheet(R, columns=0)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_and_nothing_waits(no_waits: Callable[[], AbstractContextManager[None]]) -> None:
    generator = torch.Generator().manual_seed(0)
    count = 500

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    inputs = {
        "pixels": random(0, 17, count, 16, 16),
        "rgba": random(0, 256, count, 16, 16, 4),
        "palette": random(0, 256, 17, 4),
        "mapping": random(0, 17, 17),
        "mappings": random(0, 17, count, 17),
        "turns": torch.randint(-4, 8, (count,), generator=generator),
        "colours": random(1, 17, count),
    }
    calls: dict[str, Callable[[SimpleNamespace], Tensor]] = {
        "look_up": lambda i: look_up(i.pixels, i.palette),
        "nearest_colour": lambda i: nearest_colour(i.rgba, i.palette),
        "dither": lambda i: dither(i.rgba, i.palette),
        "flip": lambda i: flip(i.pixels),
        "flip vertical": lambda i: flip(i.pixels, vertical=True),
        "flip some": lambda i: flip(i.pixels, i.turns > 1),
        "rotate": lambda i: rotate(i.pixels, 3),
        "rotate each": lambda i: rotate(i.pixels, i.turns),
        "outline": lambda i: outline(i.pixels, 7),
        "outline each": lambda i: outline(i.pixels, i.colours),
        "shift_hue": lambda i: shift_hue(i.pixels, i.mapping),
        "shift_hue each": lambda i: shift_hue(i.pixels, i.mappings),
        "upscale": lambda i: upscale(i.pixels, 3),
        "contact_sheet": lambda i: contact_sheet(i.rgba, 7, 2, (1, 2, 3, 4)),
    }
    here = SimpleNamespace(**inputs)
    there = SimpleNamespace(**{name: value.cuda() for name, value in inputs.items()})
    for name, call in calls.items():
        with no_waits():
            found = call(there)
        assert torch.equal(found.cpu(), call(here)), name
