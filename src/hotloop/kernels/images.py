"""Images of two bytes a number whose channels lie together: normalised, shifted, activated, added to and pooled."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hotloop.kernels.nvrtc import Kernels

GROUP = 8  # channels that a thread reads at once
THREADS = 512  # of a block that sums
POOLING = 256  # threads of a block that pools
AT_ONCE = 2  # blocks of a multiprocessor
DTYPES = (torch.bfloat16, torch.float16)
LARGEST_SIDE = 3  # of a window, whose pixels are told apart by the compiler

_SOURCE = Path(__file__).with_name("images.cu")
_LAST = torch.channels_last


@dataclass(frozen=True)
class Activation:
    """An activation as the kernels know it."""

    kind: int = 0  # 0: none, 1: ReLU or leaky ReLU, 2: GELU, 3: GELU by tanh, 4: SiLU
    slope: float = 0.0


NONE = Activation()


def why_not_image(x: Tensor) -> str | None:
    """Why the kernels do not take a tensor; None where they do."""
    if not x.is_cuda or x.dtype not in DTYPES or x.dim() != 4:
        return "it is no image of two bytes a number on a GPU"
    if x.shape[1] % GROUP or not x.is_contiguous(memory_format=_LAST) or x.data_ptr() % 16:
        return "its channels do not lie together in groups of 8"
    rows = x.numel() // x.shape[1] if x.numel() else 0
    return None if 1 < rows < 2**31 else "it has too few or too many pixels"


def kernels_for(device: torch.device, dtype: torch.dtype, *macros: str) -> Kernels:
    """A part of the source, compiled on first use for a kind of GPU and of numbers."""
    half = ("FP16",) if dtype == torch.float16 else ()
    return _kernels(torch.cuda.get_device_capability(device), (*half, *macros))


@cache
def _kernels(capability: tuple[int, int], macros: tuple[str, ...]) -> Kernels:
    return Kernels(_SOURCE, macros, capability)


def normalization_of(layer: nn.BatchNorm2d, x: Tensor, shift: Tensor | None) -> Tensor:
    """The scales of a batch's normalisation, with the running statistics brought up to date.

    `shift` is the bias that the convolution before it left out: a batch is normalised to the same without it.
    """
    kernels = kernels_for(x.device, x.dtype)
    grid, block = _summing(x)
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    tracked = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    partial = x.new_empty((grid[0], 2, channels), dtype=torch.float32)
    scales = x.new_empty((4, channels), dtype=torch.float32)
    assert layer.momentum is not None
    with torch.cuda.device(x.device):
        kernels.launch("statistics", grid, block, x, partial, rows, channels // GROUP)
        given = (layer.weight, layer.bias, shift, *tracked, float(layer.momentum), float(layer.eps), scales)
        kernels.launch("normalization", *_finishing(channels), partial, grid[0], channels, rows, x, *given)
    torch.autograd.graph.increment_version([each for each in tracked if each is not None])
    return scales


def shift_of(bias: Tensor, x: Tensor) -> Tensor:
    """The scales that add a bias."""
    channels = x.shape[1]
    scales = x.new_empty((4, channels), dtype=torch.float32)
    with torch.cuda.device(x.device):
        kernels_for(x.device, x.dtype).launch(
            "shift_scales", (_blocks(channels, 128), 1), (128, 1), bias, channels, scales
        )
    return scales


class FusedImage(Function):
    """`activation(factor * x + summand + residual)`, and the largest of each window of it where `side` is given.

    Normalised where there is a `weight`, else shifted by `bias`. A `shift` has been left out of x, and since it would
    have been taken away with the mean, its gradient is zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor,
        shift: Tensor | None,
        residual: Tensor | None,
        scales: Tensor,
        activation: Activation,
        side: int,
    ) -> Tensor:
        ctx.activation, ctx.side, ctx.shape, ctx.normalized = activation, side, x.shape, weight is not None
        ctx.has_shift, ctx.has_residual = shift is not None, residual is not None
        groups = x.shape[1] // GROUP
        with torch.cuda.device(x.device):
            if side:
                y, chosen, place = pooled(x, scales, activation, side)
                ctx.save_for_backward(x if ctx.normalized else None, None, chosen, place, scales)
                return y
            y = torch.empty_like(x)
            kernels = kernels_for(x.device, x.dtype, f"KIND={activation.kind}")
            kernels.launch(
                "forward", *_moving(x), x, residual, y, scales, x.numel() // x.shape[1], groups, activation.slope
            )
        told_by_y = activation.kind == 1 and (residual is not None or not ctx.normalized)
        needs_x = ctx.normalized or (activation.kind and not told_by_y)
        ctx.save_for_backward(x if needs_x else None, y if told_by_y else None, None, None, scales)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y, chosen, place, scales = ctx.saved_tensors
        activation: Activation = ctx.activation
        gradient = gradient.contiguous(memory_format=_LAST)
        channels, groups = ctx.shape[1], ctx.shape[1] // GROUP
        rows, all_rows = gradient.numel() // channels, ctx.shape.numel() // channels
        kind, slope = f"KIND={activation.kind}", activation.slope
        kernels = kernels_for(gradient.device, gradient.dtype, kind)
        grid, block = _summing(gradient)
        partial = gradient.new_empty((grid[0], 2, channels), dtype=torch.float32)
        small = gradient.new_empty((5, channels), dtype=torch.float32)
        weight, bias, shift, through = small[0], small[1], small[2], small[3:]

        passed_on = not ctx.side and (ctx.has_residual or not ctx.normalized)  # what was before the activation
        before = (torch.empty_like(gradient) if activation.kind else gradient) if passed_on else None
        seen = next(each for each in (chosen, x, y, gradient) if each is not None)
        written = before if before is not gradient else None
        kernels.launch("gradient_sums", grid, block, gradient, seen, y, written, scales, partial, rows, groups, slope)
        given = (scales, weight if ctx.normalized else None, bias, shift if ctx.has_shift else None, through)
        common = kernels_for(gradient.device, gradient.dtype)
        common.launch("normalization_gradient", *_finishing(channels), partial, grid[0], channels, all_rows, *given)
        result: Tensor | None = None
        if ctx.needs_input_grad[0]:
            if ctx.side:
                towards = through if ctx.normalized else None
                result = unpooled(gradient, x, chosen, place, scales, towards, ctx.shape, activation, ctx.side)
            elif ctx.normalized:
                result = torch.empty_like(x)
                plain = kernels if before is None else kernels_for(gradient.device, gradient.dtype, "KIND=0")
                source = gradient if before is None else before
                plain.launch("backward", *_moving(x), source, x, result, scales, through, rows, groups, slope)
            else:
                result = before
        return (
            result,
            weight if ctx.normalized else None,
            bias,
            shift if ctx.has_shift else None,
            before if ctx.has_residual else None,
            *(None, None, None),
        )


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
        gradient = gradient.contiguous(memory_format=_LAST)
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
    kernels.launch("pool_forward", *_moving(y, POOLING), x, y, chosen, place, scales, *sizes)
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
    geometry = _moving(gradient, POOLING)
    kernels.launch("pool_backward", *geometry, gradient, x, chosen, place, result, scales, through, *sizes)
    return result


def _summing(x: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid and the block of a kernel that sums: as many blocks as run at once, each with a few rows at least."""
    (across, down), tall = _block(x, THREADS)
    most = max(1, AT_ONCE * _processors(x.device) // tall)
    return (min(most, _blocks(x.numel() // x.shape[1], 4 * down)), tall), (across, down)


def _moving(x: Tensor, threads: int = THREADS) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid and the block of a kernel that goes over the rows once."""
    (across, down), tall = _block(x, threads)
    most = max(1, 8 * AT_ONCE * _processors(x.device) * THREADS // threads // tall)
    return (min(most, _blocks(x.numel() // x.shape[1], down)), tall), (across, down)


def _block(x: Tensor, threads: int) -> tuple[tuple[int, int], int]:
    groups = x.shape[1] // GROUP
    across = min(32, 1 << (groups - 1).bit_length())
    return (across, threads // across), _blocks(groups, across)


def _finishing(channels: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (_blocks(channels, 32), 1), (32, 16)


def _blocks(items: int, of: int) -> int:
    return -(-items // of)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
