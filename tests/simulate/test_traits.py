"""Which kernel an operation takes is known from its arguments and sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from calibration_observe import observe
from hotloop.apps.simulate.work import WorkPart, parts_of


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, device="meta", dtype=dtype)


def last_part(call: Callable[[], object]) -> WorkPart:
    return [part for operation in observe(call) for part in parts_of(operation)][-1]


IMAGES = meta(2, 8, 6, 6)
ROWS = meta(32, 16)


@pytest.mark.parametrize(
    ("call", "variant"),
    [
        (lambda: F.layer_norm(ROWS, (16,)), "layer"),
        (lambda: F.log_softmax(ROWS, -1), "softmax"),
        (lambda: F.group_norm(IMAGES, 4), "group"),
        (lambda: F.batch_norm(IMAGES, None, None, training=True), "batch"),
        (ROWS.sum, "all"),
        (lambda: ROWS.sum(0), "columns"),
        (lambda: ROWS.sum(-1), "rows"),
        (lambda: IMAGES.sum((0, 2, 3)), "rows"),
        (ROWS.clone, "plain"),
        (lambda: ROWS.t().contiguous(), "transposed"),
        (lambda: IMAGES.contiguous(memory_format=torch.channels_last), "transposed"),
        (lambda: IMAGES.transpose(1, 2).contiguous(), "plain"),
        (lambda: ROWS.to(torch.bfloat16), "cast"),
        (lambda: torch.native_dropout(ROWS, 0.1, True), "dropout"),
        (ROWS.normal_, "drawn"),
        (lambda: F.max_pool2d(IMAGES, 2), "max_pool"),
        (lambda: F.conv2d(IMAGES, meta(4, 8, 1, 1)), "colours"),
        (lambda: F.conv2d(IMAGES, meta(16, 8, 1, 1)), "1x1"),
        (lambda: F.conv2d(IMAGES, meta(16, 8, 1, 1), stride=2), ""),
        (lambda: F.conv2d(meta(2, 3, 6, 6), meta(16, 3, 3, 3)), "colours"),
    ],
)
def test_variants(call, variant):
    assert last_part(call).variant == variant


def test_the_sizes_of_a_convolution_are_the_same_for_all_its_gradients():
    layer = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False, device="meta")
    images = meta(2, 8, 12, 12).requires_grad_()
    seen = [part for operation in observe(lambda: layer(images).sum().backward()) for part in parts_of(operation)]
    traits = {part.traits for part in seen if part.family.startswith("conv")}
    assert traits == {(2 * 6 * 6, 8, 16, 9, 2, 8)}


def test_an_odd_vocabulary_is_told_from_an_even_one():
    odd, even = (last_part(lambda width=width: meta(64, 32) @ meta(32, width)) for width in (50_257, 50_304))
    assert (odd.traits[-1], even.traits[-1]) == (1, 8)
