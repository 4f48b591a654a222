"""Which operands are copied before a kernel begins: PyTorch on a GPU is asked by what it takes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.families import disordered
from hotloop.apps.simulate.operations import shape_of

IMAGE = Shape((8, 64, 32, 32), "float32", 4)
LAST = Shape((8, 64, 32, 32), "float32", 4, channels_last=True, strides=(65536, 1, 2048, 64))
SLICE = Shape((8, 64, 32, 32), "float32", 4, strides=(131072, 1024, 32, 1))
WEIGHT = Shape((64, 64, 3, 3), "float32", 4)


def copied(name: str, *inputs: Shape) -> tuple[Shape, ...]:
    return disordered(Operation(f"aten.{name}.default", inputs, ()), name)


def test_what_lies_in_one_piece_is_taken_as_it_is() -> None:
    assert copied("convolution", IMAGE, WEIGHT) == ()
    assert copied("convolution_backward", IMAGE, IMAGE, WEIGHT) == ()
    assert copied("native_layer_norm", IMAGE) == ()
    assert copied("add", SLICE) == ()


def test_a_slice_is_copied() -> None:
    assert copied("convolution", SLICE, WEIGHT) == (SLICE,)
    assert copied("convolution_backward", SLICE, IMAGE, WEIGHT) == (SLICE,)
    assert copied("native_layer_norm_backward", SLICE, IMAGE) == (SLICE,)
    assert copied("embedding_dense_backward", SLICE) == (SLICE,)
    assert copied("native_group_norm", LAST) == (LAST,)  # as an H200 was seen to do


def test_all_operands_of_a_convolution_get_the_order_of_its_input() -> None:
    assert copied("convolution", LAST, WEIGHT) == (WEIGHT,)
    assert copied("convolution_backward", IMAGE, LAST, WEIGHT) == (WEIGHT, IMAGE)
    pixel = Shape((64, 64, 1, 1), "float32", 4)  # which has both orders at once
    assert copied("convolution", LAST, pixel) == ()


def parts(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=1)[:, : x.size(1)]


@pytest.mark.gpu
@pytest.mark.parametrize("change", [lambda x: x, parts, lambda x: x.contiguous(memory_format=torch.channels_last)])
@pytest.mark.parametrize("norm", [True, False])
def test_a_gpu_takes_a_copy_of_what_is_disordered(change: Callable[[Tensor], Tensor], norm: bool) -> None:
    x = change(torch.randn(64, 256, 32, 32, device="cuda"))

    def run() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        y = F.group_norm(x, 8) if norm else F.layer_norm(x, x.shape[-1:])
        stats = torch.cuda.memory_stats()
        assert y.shape == x.shape
        return int(stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"])

    run()
    name = "native_group_norm" if norm else "native_layer_norm"
    shape = shape_of(x)
    said = sum(each.nbytes for each in disordered(Operation(name, (shape,), ()), name))
    assert run() == pytest.approx(said, abs=5 * 2**20)  # and the means that nobody keeps
