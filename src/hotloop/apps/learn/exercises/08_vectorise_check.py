"""Compares `contrast` with a loop over the pixels: the same values, and much faster."""

import ast
from collections.abc import Iterator

import torch
from torch import Tensor

import hotloop
from hotloop.apps.learn.judging import CheckVerdict, Ran
from hotloop.printing.text import duration

ON = ("cpu",)
LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp)
LIMIT = 2e-3  # seconds for 32 × 32 pixels: a loop over rows takes longer than that on no machine, one operation less


def slow(image: Tensor) -> Tensor:
    values = [0.5 * v if v < 0.5 else min(v * 1.5, 1.0) for v in image.flatten().tolist()]
    return torch.tensor(values).view_as(image)


def check(ran: Ran) -> Iterator[CheckVerdict]:
    contrast = ran["contrast"]
    image = torch.rand(32, 32, generator=torch.Generator().manual_seed(5))
    before = image.clone()
    told = contrast(image)
    expected = slow(before)
    dark, bright = before < 0.5, before >= 0.5
    same = told.shape == expected.shape
    yield CheckVerdict(
        "dark pixels become half as bright",
        same and torch.allclose(told[dark], expected[dark], atol=1e-6),
        "pixels below 0.5 are not what the loop gave: torch.where(image < 0.5, image * 0.5, …) picks for each pixel",
    )
    hint = "pixels from 0.5 on are not what the loop gave: 1.5 times, and at most 1"
    if same and float(told.max()) > 1:
        hint = f"a pixel became {float(told.max()):.2f}: nothing may be above 1, so .clamp(max=1)"
    yield CheckVerdict(
        "bright ones become 1.5 times as bright, at most 1",
        same and torch.allclose(told[bright], expected[bright], atol=1e-6),
        hint,
    )
    yield CheckVerdict(
        "the picture that was given stays as it was",
        torch.equal(image, before),
        "contrast changes its argument: operations that end in _ and assignments to image[…] work in place",
    )
    loops = [node for node in ast.walk(ran.function("contrast")) if isinstance(node, LOOPS)]
    hint = ""
    if loops:
        comprehension = isinstance(loops[0], ast.ListComp | ast.GeneratorExp)
        kind = "a comprehension is a loop too" if comprehension else "a loop over rows or pixels is left"
        hint = f"line {loops[0].lineno}: {kind}; one operation can take all pixels at once"
    seconds = hotloop.measure(lambda: contrast(before), warmup=1, repeats=3).low
    yield CheckVerdict(
        "no Python loop goes over the pixels",
        not loops and seconds < LIMIT,
        hint or f"32 × 32 pixels take {duration(seconds)}, as long as a loop",
    )
