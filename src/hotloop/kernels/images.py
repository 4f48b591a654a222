"""Images of two bytes a number whose channels lie together: normalised, shifted, activated, added to and pooled."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hotloop.kernels.nvrtc import HALVES, kernels_of

GROUP = 8  # channels that a thread reads at once
SUM_THREADS = 512  # of a block that sums
POOLING = 256  # threads of a block that pools
AT_ONCE = 2  # blocks of a multiprocessor
MOST_IMAGES = 2**16  # of a batch: the last dimension of a grid
LARGEST_SIDE = 3  # of a window, whose pixels are told apart by the compiler

_SOURCE = Path(__file__).with_name("images.cu")
kernels_for = partial(kernels_of, _SOURCE)
_LAST = torch.channels_last


@dataclass(frozen=True)
class Activation:
    """An activation as the kernels know it."""

    kind: int = 0  # 0: none, 1: ReLU or leaky ReLU, 2: GELU, 3: GELU by tanh, 4: SiLU
    slope: float = 0.0


NONE = Activation()


def is_image(x: Tensor) -> bool:
    """Whether the kernels take a tensor: an image of two bytes a number on a GPU, its channels together in eights."""
    if not x.is_cuda or x.dtype not in HALVES or x.dim() != 4:
        return False
    if x.shape[1] % GROUP or not x.is_contiguous(memory_format=_LAST) or x.data_ptr() % 16:
        return False
    rows = x.numel() // x.shape[1] if x.numel() else 0
    return 1 < rows < 2**31 and x.shape[0] < MOST_IMAGES


def readable(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """A tensor as the kernels read it, 16 bytes at once; a copy where it lies otherwise, as a part of another may."""
    tensor = tensor.contiguous(memory_format=memory_format)
    return tensor.clone(memory_format=memory_format) if tensor.data_ptr() % 16 else tensor


@dataclass(frozen=True)
class Scales:
    """What the channels of a batch, or of each of its images, are multiplied by, and what is added to them."""

    rows: Tensor  # for each slice and channel: factor, summand, mean, one over the standard deviation
    together: int = 0  # channels of an image that are normalised as one; 0 where images are not normalised
    away: Tensor | None = None  # for each image and channel, the sum of what it is away from the mean

    @property
    def slices(self) -> int:
        return self.rows.shape[0]


def batch_scales(layer: nn.BatchNorm2d, x: Tensor, shift: Tensor | None) -> Scales:
    """The scales that normalise a batch, with the running statistics brought up to date.

    `shift` is the bias that the convolution before it left out: a batch is normalised to the same without it.
    """
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    partial = _statistics(x, slices=1, together=1)
    scales = partial.new_empty((1, 4, channels))
    tracked = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    assert layer.momentum is not None
    given = (layer.weight, layer.bias, shift, *tracked, float(layer.momentum), float(layer.eps), scales)
    with torch.cuda.device(x.device):
        kernels_for(x.device, x.dtype).launch(
            "normalization", *_by_channel(channels), partial, partial.shape[1], channels, rows, x, *given
        )
    torch.autograd.graph.increment_version([each for each in tracked if each is not None])
    return Scales(scales)


def group_scales(layer: nn.GroupNorm, x: Tensor, shift: Tensor | None) -> Scales:
    """The scales that normalise each image.

    `shift` has been left out of x, with a row for each image. It counts: it moves the channels of a group apart.
    """
    images, channels = x.shape[:2]
    together, rows = channels // layer.num_groups, x.numel() // channels // images
    partial = _statistics(x, slices=images, together=together)
    scales = partial.new_empty((images, 4, channels))
    away = None if shift is None else partial.new_empty((images, channels))
    given = (layer.weight, layer.bias, shift, 0 if shift is None else shift.stride(0), float(layer.eps), scales, away)
    with torch.cuda.device(x.device):
        kernels_for(x.device, x.dtype, "GROUPS").launch(
            "group_normalization",
            *_by_group(layer.num_groups, images),
            *(partial, partial.shape[1], channels, rows, together, x, *given),
        )
    return Scales(scales, together, away)


def shift_scales(bias: Tensor, x: Tensor) -> Scales:
    """The scales that add a bias, which is the same for all images or has a row for each."""
    channels, slices = x.shape[1], 1 if bias.dim() == 1 else x.shape[0]
    scales = x.new_empty((slices, 4, channels), dtype=torch.float32)
    grid, block = (_blocks(channels, 128), 1, slices), (128, 1)
    with torch.cuda.device(x.device):
        kernels_for(x.device, x.dtype).launch("shift_scales", grid, block, bias, channels, scales)
    return Scales(scales)


def _statistics(x: Tensor, *, slices: int, together: int) -> Tensor:
    """The sums from which mean and variance come, of each slice and block."""
    grid, block = _summing(x, slices)
    channels = x.shape[1]
    partial = x.new_empty((slices, grid[0], 2, channels), dtype=torch.float32)
    sizes = (x.numel() // channels // slices, channels // GROUP, together)
    with torch.cuda.device(x.device):
        kernels_for(x.device, x.dtype).launch("statistics", grid, block, x, partial, *sizes)
    return partial


class FusedImage(Function):
    """`activation(factor * x + summand + residual)`, and the largest of each window of it where `side` is given.

    Normalised where there is a `weight`, else shifted by `bias`. A `shift` has been left out of x; where a batch is
    normalised it would have been taken away with the mean, and its gradient is zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor,
        shift: Tensor | None,
        residual: Tensor | None,
        scales: Scales,
        activation: Activation,
        side: int,
    ) -> Tensor:
        ctx.activation, ctx.side, ctx.shape, ctx.bias_shape = activation, side, x.shape, bias.shape
        ctx.normalized, ctx.together = weight is not None, scales.together
        ctx.has_shift, ctx.has_residual = shift is not None, residual is not None
        with torch.cuda.device(x.device):
            if side:
                y, chosen, place = pooled(x, scales.rows, activation, side)
                ctx.save_for_backward(x if ctx.normalized else None, None, chosen, place, scales.rows, None)
                return y
            y = torch.empty_like(x)
            sizes = (x.numel() // x.shape[1] // scales.slices, x.shape[1] // GROUP, activation.slope)
            kernels_for(x.device, x.dtype, f"KIND={activation.kind}").launch(
                "forward", *_moving(x, scales.slices), x, residual, y, scales.rows, *sizes
            )
        told_by_y = activation.kind == 1 and (residual is not None or not ctx.normalized)
        needs_x = ctx.normalized or (activation.kind and not told_by_y)
        saved = (x if needs_x else None, y if told_by_y else None, None, None, scales.rows, scales.away)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y, chosen, place, scales, away = ctx.saved_tensors
        activation: Activation = ctx.activation
        slope, channels, slices = activation.slope, ctx.shape[1], scales.shape[0]
        gradient = readable(gradient, _LAST)
        sizes = (gradient.numel() // channels // slices, channels // GROUP, slope)
        kernels = kernels_for(gradient.device, gradient.dtype, f"KIND={activation.kind}")

        passed_on = not ctx.side and (ctx.has_residual or not ctx.normalized)  # what was before the activation
        before = (torch.empty_like(gradient) if activation.kind else gradient) if passed_on else None
        seen = next(each for each in (chosen, x, y, gradient) if each is not None)
        written = before if before is not gradient else None
        grid, block = _summing(gradient, slices)
        partial = gradient.new_empty((slices, grid[0], 2, channels), dtype=torch.float32)
        kernels.launch("gradient_sums", grid, block, gradient, seen, y, written, scales, partial, *sizes)
        small = _group_gradients if ctx.together else _channel_gradients
        through, weight, bias, shift = small(ctx, gradient.dtype, partial, scales, away)
        result: Tensor | None = None
        if ctx.needs_input_grad[0]:
            if ctx.side:
                result = unpooled(gradient, x, chosen, place, scales, through, ctx.shape, activation, ctx.side)
            elif ctx.normalized:
                result = torch.empty_like(x)
                plain = kernels if before is None else kernels_for(gradient.device, gradient.dtype, "KIND=0")
                source = gradient if before is None else before
                plain.launch("backward", *_moving(x, slices), source, x, result, scales, through, *sizes)
            else:
                result = before
        return result, weight, bias, shift, before if ctx.has_residual else None, None, None, None


Small = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]


def _channel_gradients(ctx: Any, dtype: torch.dtype, partial: Tensor, scales: Tensor, away: Tensor | None) -> Small:
    """What the gradient of x gets through the statistics of the batch; the gradients of weight, bias and shift."""
    slices, blocks, _, channels = partial.shape
    bias = partial.new_empty((slices, channels))
    through = partial.new_empty((1, 2, channels)) if ctx.normalized else None
    weight, shift = partial.new_empty((2, channels)) if ctx.normalized else (None, None)
    shift = shift if ctx.has_shift else None
    rows = ctx.shape.numel() // channels // slices
    kernels_for(partial.device, dtype).launch(
        "normalization_gradient",
        *_by_channel(channels, slices),
        *(partial, blocks, channels, rows, scales, weight, bias, shift, through),
    )
    return through, weight, bias.view(ctx.bias_shape), shift


def _group_gradients(ctx: Any, dtype: torch.dtype, partial: Tensor, scales: Tensor, away: Tensor | None) -> Small:
    """The same through the statistics of each image."""
    images, blocks, _, channels = partial.shape
    through, shares = partial.new_empty((2, images, 2, channels))
    weight, bias = partial.new_empty((2, channels))
    shift = None if away is None else torch.empty_like(away)
    kernels = kernels_for(partial.device, dtype, "GROUPS")
    sizes = (blocks, channels, ctx.shape.numel() // channels // images, ctx.together)
    geometry = _by_group(channels // ctx.together, images)
    kernels.launch("group_gradient", *geometry, partial, *sizes, scales, away, shares, shift, through)
    kernels.launch("share_sums", *_by_channel(channels), shares, images, channels, weight, bias)
    return through, weight, bias, shift


class PooledImage(Function):
    """The largest of each window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: int) -> Tensor:
        with torch.cuda.device(x.device):
            y, _, place = pooled(x, None, NONE, side)
        ctx.save_for_backward(place)
        ctx.shape, ctx.side = x.shape, side
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        gradient = readable(gradient, _LAST)
        return unpooled(gradient, None, None, place, None, None, ctx.shape, NONE, ctx.side), None


def pooled(x: Tensor, scales: Tensor | None, activation: Activation, side: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """The largest of each window; the x that it came from, where scales were given; and which of the window it was."""
    count, channels, height, width = x.shape
    shape = (count, channels, height // side, width // side)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_LAST)
    chosen = None if scales is None else torch.empty_like(y)
    place = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=_LAST)
    kernels = kernels_for(x.device, x.dtype, f"KIND={activation.kind}", f"SIDE={side}")
    windows, groups = y.numel() // channels, channels // GROUP
    sizes = (windows, height, width, groups, activation.slope)
    kernels.launch("pool_forward", *_moving(y, threads=POOLING), x, y, chosen, place, scales, *sizes)
    return y, chosen, place


def unpooled(
    gradient: Tensor,
    x: Tensor | None,
    chosen: Tensor | None,
    place: Tensor,
    scales: Tensor | None,
    through: Tensor | None,
    shape: torch.Size,
    activation: Activation,
    side: int,
) -> Tensor:
    """The gradient of x."""
    count, channels, height, width = shape
    result = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=_LAST)
    kernels = kernels_for(gradient.device, gradient.dtype, f"KIND={activation.kind}", f"SIDE={side}")
    sizes = (count, height, width, channels // GROUP, activation.slope)
    geometry = _moving(gradient, threads=POOLING)
    kernels.launch("pool_backward", *geometry, gradient, x, chosen, place, result, scales, through, *sizes)
    return result


Geometry = tuple[tuple[int, int, int], tuple[int, int]]  # a grid and its blocks


def _summing(x: Tensor, slices: int) -> Geometry:
    """Of a kernel that sums: as many blocks as run at once, each with a few rows at least."""
    (across, down), tall = _block(x, SUM_THREADS)
    most = max(1, AT_ONCE * multiprocessors(x.device) // (tall * slices))
    rows = x.numel() // x.shape[1] // slices
    return (min(most, _blocks(rows, 4 * down)), tall, slices), (across, down)


def _moving(x: Tensor, slices: int = 1, threads: int = SUM_THREADS) -> Geometry:
    """Of a kernel that goes over the rows once."""
    (across, down), tall = _block(x, threads)
    most = max(1, 8 * AT_ONCE * multiprocessors(x.device) * SUM_THREADS // threads // (tall * slices))
    rows = x.numel() // x.shape[1] // slices
    return (min(most, _blocks(rows, down)), tall, slices), (across, down)


def _block(x: Tensor, threads: int) -> tuple[tuple[int, int], int]:
    groups = x.shape[1] // GROUP
    across = min(32, 1 << (groups - 1).bit_length())
    return (across, threads // across), _blocks(groups, across)


def _by_channel(channels: int, slices: int = 1) -> Geometry:
    """Of a kernel that adds up what the blocks of each slice summed, 32 channels at a time."""
    return (_blocks(channels, 32), 1, slices), (32, 16)


def _by_group(groups: int, images: int) -> Geometry:
    """The same with a warp for each group of channels of an image."""
    return (_blocks(groups, 4), 1, images), (32, 4)


def _blocks(items: int, of: int) -> int:
    return -(-items // of)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
