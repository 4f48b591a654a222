"""Depthwise convolutions, in which each channel has a window of its own, at the speed of the memory.

Where channels lie together, cuDNN compiles its kernels when it first meets a layer, for one to three seconds.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hotloop.kernels.images import multiprocessors, readable
from hotloop.kernels.nvrtc import Kernels, computes_in_half, kernels_of
from hotloop.kernels.patches import Geometry

THREADS = 256
STRIP = 4  # pixels that a thread has at once
WIDEST_WINDOW = 7  # window, of which a thread holds a line
COUNTABLE = 2**31  # numbers, whose places the kernels count
TOGETHER = 64  # channels of a block

_SOURCE = Path(__file__).with_name("depthwise.cu")
_LAST = torch.channels_last


def is_depthwise(layer: nn.Module) -> "TypeGuard[nn.Conv2d]":
    """Whether a layer is a depthwise convolution that the kernels know."""
    if type(layer) is not nn.Conv2d or not layer.in_channels == layer.out_channels == layer.groups:
        return False
    is_plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    fits = max(layer.kernel_size) <= WIDEST_WINDOW and set(layer.stride) <= {1, 2}
    return is_plain and fits and layer.groups > 1 and layer.groups % 2 == 0


def prepare_depthwise(layers: Iterable[nn.Conv2d], device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels of such layers beside whatever is done meanwhile."""
    for geometry in set(map(_geometry, layers)):
        _kernels(geometry, device, dtype).compile_beside()


def can_be_depthwise(layer: nn.Conv2d, batch: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels take a batch of such a layer, which has windows, and not too many."""
    if not computes_in_half(batch, dtype):
        return False
    places = _geometry(layer).on(batch.shape).places
    most = max(batch.numel(), batch.shape[:2].numel() * math.prod(places))
    return min(*places, *batch.shape) >= 1 and most < COUNTABLE


def depthwise(layer: nn.Conv2d, batch: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The output of such a layer, with channels together. The weights are not rounded."""
    bias = None if bias is None else bias.float().contiguous()
    weight = layer.weight.float().contiguous()
    return _Depthwise.apply(batch.to(dtype), weight, bias, _geometry(layer))  # type: ignore[no-any-return, no-untyped-call]


class _Depthwise(Function):
    @staticmethod
    def forward(image: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        image = readable(image, _LAST)
        places = geometry.on(image.shape).places
        shape = (*image.shape[:2], *places)
        output = torch.empty(shape, dtype=image.dtype, device=image.device, memory_format=_LAST)
        _launch("forward", geometry, image, places, image.shape[0] * _strips(places), image, weight, bias, output)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        image, weight, _, ctx.geometry = inputs
        ctx.save_for_backward(image, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        image, weight = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        gradient, places = readable(gradient, _LAST), gradient.shape[2:]
        of_image = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_image = torch.empty_like(image, memory_format=_LAST)
            count = image.shape[0] * _strips(image.shape[2:])
            _launch("of_image", geometry, image, places, count, gradient, weight, of_image)
        if any(ctx.needs_input_grad[1:3]):
            sums = _weight_sums(geometry, readable(image, _LAST), gradient)
            of_weight = sums[:-1].T.reshape(weight.shape)
            of_bias = sums[-1] if ctx.needs_input_grad[2] else None
        return of_image, of_weight, of_bias, None


def _weight_sums(geometry: Geometry, image: Tensor, gradient: Tensor) -> Tensor:
    """For each place of a window, and then for the bias, the gradients of all channels."""
    channels, (tall, wide), places = image.shape[1], geometry.size, gradient.shape[2:]
    across, blocks = _blocks(geometry, channels)
    strips = image.shape[0] * _strips(places)
    parts = max(1, min(4 * multiprocessors(image.device) // (blocks * tall), -(-strips * across // THREADS)))
    sums = image.new_empty((parts, tall * wide + 1, channels), dtype=torch.float32)
    sizes = (image.shape[0], *image.shape[2:], *places, channels)
    with torch.cuda.device(image.device):
        kernels = _kernels(geometry, image.device, image.dtype)
        grid, block = (parts, blocks, tall), (across, THREADS // across)
        kernels.launch("of_weight", grid, block, image, gradient, sums, *sizes)
    return sums.sum(0)


def _launch(
    name: str, geometry: Geometry, image: Tensor, places: Iterable[int], strips: int, *tensors: Tensor | None
) -> None:
    """So many strips of each group of channels; a block goes on with others when it is done."""
    channels = image.shape[1]
    across, blocks = _blocks(geometry, channels)
    most = max(1, 8 * multiprocessors(image.device) // blocks)
    grid = (min(most, -(-strips * across // THREADS)), blocks, 1)
    sizes = (image.shape[0], *image.shape[2:], *places, channels)
    with torch.cuda.device(image.device):
        kernels = _kernels(geometry, image.device, image.dtype)
        kernels.launch(name, grid, (across, THREADS // across), *tensors, *sizes)


def _blocks(geometry: Geometry, channels: int) -> tuple[int, int]:
    """How many threads of a block lie beside one another, and how many blocks: so that few threads have nothing."""
    groups, widest = channels // geometry.channels, TOGETHER // geometry.channels
    powers = [2**power for power in range(widest.bit_length())]
    across = min(reversed(powers[-2:]), key=lambda lanes: -(-groups // lanes) * lanes)
    across = next((lanes for lanes in powers if lanes >= groups), across)
    return across, -(-groups // across)


def _strips(sides: Iterable[int]) -> int:
    down, across = sides
    return down * -(-across // STRIP)


def _geometry(layer: nn.Conv2d) -> Geometry:
    """How windows lie on images, and how many channels a thread has."""
    assert not isinstance(layer.padding, str)
    down, across = layer.padding
    one_thread = 2 if layer.groups % 8 else 8
    size, stride, dilation = tuple(layer.kernel_size), tuple(layer.stride), tuple(layer.dilation)
    return Geometry(one_thread, size, stride, (down, across), dilation)


def _kernels(geometry: Geometry, device: torch.device, dtype: torch.dtype) -> Kernels:
    return kernels_of(_SOURCE, device, dtype, *geometry.macros)
