"""The windows of images of few channels as rows of a matrix, and back: each is the derivative of the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hotloop.kernels.nvrtc import Kernels, computes_in_half, kernels_of

GROUP = 8  # numbers that a thread writes at once; images have fewer channels
THREADS = 256
WARP = 32
COUNTABLE = 2**31  # numbers, whose places the kernels count
MOST_BLOCKS = 2**16  # of a grid, down and deep

_SOURCE = Path(__file__).with_name("patches.cu")
_LAST = torch.channels_last
_WAYS = ("DOWN", "ACROSS")

Lengths = tuple[int, ...]  # down and across


@dataclass(frozen=True)
class Geometry:
    """How the windows of a layer lie on images, whatever the sizes of these."""

    channels: int
    size: Lengths
    stride: Lengths
    padding: Lengths
    dilation: Lengths

    @property
    def length(self) -> int:
        """Of a row, with the zeros at its end."""
        down, across = self.size
        numbers = self.channels * down * across
        return numbers + -numbers % GROUP

    def on(self, shape: Sequence[int]) -> "Windows":
        """The windows on images of a shape."""
        down, across = (
            (length + 2 * more - apart * (reach - 1) - 1) // step + 1
            for length, reach, step, more, apart in zip(
                shape[2:], self.size, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return Windows(self, torch.Size(shape), (down, across))

    def under(self, places: Sequence[int]) -> "Windows":
        """So many windows, down and across, on images that are no larger than they reach."""
        sides = (
            (count - 1) * step - 2 * more + apart * (reach - 1) + 1
            for count, reach, step, more, apart in zip(
                places[2:], self.size, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return self.on((places[0], self.channels, *sides))

    def kernels(self, device: torch.device, dtype: torch.dtype) -> Kernels:
        """Those for a kind of GPU and of numbers, which are compiled on first use."""
        return kernels_of(_SOURCE, device, dtype, *self.macros)

    @property
    def macros(self) -> tuple[str, ...]:
        pairs = {"STEP": self.stride, "PAD": self.padding, "APART": self.dilation}
        ways = [f"{name}_{way}={value}" for name, pair in pairs.items() for way, value in zip(_WAYS, pair, strict=True)]
        return (f"CHANNELS={self.channels}", f"TALL={self.size[0]}", f"WIDE={self.size[1]}", *ways)


@dataclass(frozen=True)
class Windows:
    """All windows on images."""

    geometry: Geometry
    shape: torch.Size  # of the images
    places: Lengths

    @property
    def rows(self) -> int:
        down, across = self.places
        return self.shape[0] * down * across

    @property
    def length(self) -> int:
        return self.geometry.length


def can_be_patches(batch: Tensor, dtype: torch.dtype, windows: Windows) -> bool:
    """Whether the kernels can be used for such windows of a batch, of which there are some, and not too many."""
    if not computes_in_half(batch, dtype):
        return False
    numbers = max(windows.rows * windows.length, windows.shape.numel())
    lines = max(windows.shape[0], windows.shape[2], windows.places[0])
    return min(*windows.places, *windows.shape) >= 1 and numbers < COUNTABLE and lines < MOST_BLOCKS


def patches(images: Tensor, windows: Windows, dtype: torch.dtype) -> Tensor:
    """A row for each window, in a precision of two bytes: for each of its pixels all channels, then zeros."""
    images = images if images.dtype in (torch.float32, dtype) else images.to(dtype)
    if sum((size - 1) * stride for size, stride in zip(images.shape, images.stride(), strict=True)) >= COUNTABLE:
        images = images.contiguous(memory_format=_LAST)
    return _Patches.apply(images, windows, dtype)  # type: ignore[no-any-return, no-untyped-call]


def folded(rows: Tensor, windows: Windows, dtype: torch.dtype) -> Tensor:
    """Images with channels together, at each pixel the sum of what the windows have there."""
    return _Folded.apply(rows, windows, dtype)  # type: ignore[no-any-return, no-untyped-call]


def product(rows: Tensor, matrix: Tensor, shape: torch.Size) -> Tensor:
    """A matmul whose result is a batch of images in channels_last."""
    return _Product.apply(rows, matrix, shape)  # type: ignore[no-any-return, no-untyped-call]


class _Patches(Function):
    @staticmethod
    def forward(images: Tensor, windows: Windows, dtype: torch.dtype) -> Tensor:
        rows = images.new_empty((windows.rows, windows.length), dtype=dtype)
        across = windows.places[1] * windows.length // GROUP
        _launch("patches", images, images, rows, (across, windows.places[0]), windows)
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, ctx.windows, _ = inputs
        ctx.dtype = images.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return folded(gradient, ctx.windows, ctx.dtype), None, None


class _Folded(Function):
    @staticmethod
    def forward(rows: Tensor, windows: Windows, dtype: torch.dtype) -> Tensor:
        rows = rows.contiguous()
        images = torch.empty(windows.shape, dtype=dtype, device=rows.device, memory_format=_LAST)
        _launch("folded", images, rows, images, (windows.shape[3], windows.shape[2]), windows)
        return images

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, ctx.windows, _ = inputs
        ctx.dtype = rows.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return patches(gradient, ctx.windows, ctx.dtype), None, None


class _Product(Function):
    """Not a view of the matmul: an activation in place would copy it, to write the derivative for a view."""

    @staticmethod
    def forward(rows: Tensor, matrix: Tensor, shape: torch.Size) -> Tensor:
        images = torch.empty(shape, dtype=rows.dtype, device=rows.device, memory_format=_LAST)
        torch.mm(rows, matrix, out=images.permute(0, 2, 3, 1).view(len(rows), -1))
        return images

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, matrix, _ = inputs
        ctx.save_for_backward(rows, matrix)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, matrix = ctx.saved_tensors
        flat = gradient.permute(0, 2, 3, 1).reshape(len(rows), -1)
        needs_rows, needs_matrix, _ = ctx.needs_input_grad
        return flat @ matrix.T if needs_rows else None, rows.T @ flat if needs_matrix else None, None


def _launch(name: str, images: Tensor, source: Tensor, result: Tensor, threads: Lengths, windows: Windows) -> None:
    """So many threads across and down for each image."""
    across, down = threads
    rows = source if result is images else result
    block = min(THREADS, across + -across % WARP)
    grid = (-(-across // block), down, len(images))
    sizes = (*windows.places, int(images.dtype == torch.float32), *images.shape[2:], *images.stride())
    with torch.cuda.device(images.device):
        windows.geometry.kernels(images.device, rows.dtype).launch(name, grid, (block, 1), source, result, *sizes)
