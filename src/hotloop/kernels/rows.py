"""`nn.LayerNorm`, and the gradient of the bias of `nn.Linear`, at the speed of the memory."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hotloop._torch import version_of
from hotloop.kernels.images import DTYPES, multiprocessors
from hotloop.kernels.nvrtc import Kernels

GROUP = 8  # numbers that a thread reads at once
WIDEST = 8192  # row that the threads of a block hold
THREADS = 256
FEW = 64  # rows that a block sums at least
MOST = 2**31  # rows

_SOURCE = Path(__file__).with_name("rows.cu")
_HALF = "_hotloop_half"  # where the output of a normalisation has its copy in two bytes


def row_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that these kernels can take: those that nobody has derived from or replaced."""
    return [layer for layer in model.modules() if "forward" not in vars(layer) and _suits(layer)]


def on_rows(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Each such layer, and what its `forward` becomes."""
    for layer in row_layers(model):
        if isinstance(layer, nn.LayerNorm):
            yield layer, Normalization(layer)
        elif isinstance(layer, nn.Linear):
            yield layer, partial(linear, layer)


def prepare_rows(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels that a model will need, beside whatever is done meanwhile."""
    widths = {layer.normalized_shape[0] for layer in row_layers(model) if isinstance(layer, nn.LayerNorm)}
    for macros in ((), *((f"WIDTH={width}",) for width in widths)):
        kernels_for(device, dtype, *macros).compile_beside()


def kernels_for(device: torch.device, dtype: torch.dtype, *macros: str) -> Kernels:
    """A part of the source, compiled on first use for a kind of GPU and of numbers."""
    half = ("FP16",) if dtype == torch.float16 else ()
    return _kernels(torch.cuda.get_device_capability(device), (*half, *macros))


@cache
def _kernels(capability: tuple[int, int], macros: tuple[str, ...]) -> Kernels:
    return Kernels(_SOURCE, macros, capability)


def _suits(layer: nn.Module) -> bool:
    if type(layer) is nn.LayerNorm:
        width = layer.normalized_shape[-1]
        is_one = len(layer.normalized_shape) == 1 and width % GROUP == 0 and width <= WIDEST
        return is_one and _is_fp32(layer.weight) and _is_fp32(layer.bias)
    return type(layer) is nn.Linear and _is_fp32(layer.weight) and layer.out_features % GROUP == 0


def _is_fp32(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float32


class Normalization:
    """The `forward` of a layer norm. Autocast gives its output in fp32, and each linear layer after it makes a copy in
    two bytes; here the kernel writes the copy as well, for as long as somebody takes it."""

    def __init__(self, layer: nn.LayerNorm) -> None:
        self._layer = layer
        self._calls = 0
        self.is_taken = False

    def __call__(self, batch: Tensor) -> Tensor:
        layer = self._layer
        dtype = _half_precision(layer, batch)
        if dtype is None or not _suits(layer) or batch.shape[-1:] != layer.weight.shape:
            return nn.LayerNorm.forward(layer, batch)
        wants_half = self.is_taken or self._calls < 2
        self._calls += 1
        y, half = _LayerNorm.apply(batch, layer.weight, layer.bias, layer.eps, dtype, wants_half)  # type: ignore[no-untyped-call]
        if half is not None:
            setattr(y, _HALF, (half, version_of(y), self))
        return y  # type: ignore[no-any-return]


def linear(layer: nn.Linear, batch: Tensor) -> Tensor:
    """The output of a layer, the gradient of whose bias is summed by the kernels."""
    if (copied := getattr(batch, _HALF, None)) is not None:
        half, version, norm = copied
        if version == version_of(batch):
            norm.is_taken, batch = True, half
    bias = layer.bias
    if bias is None or not bias.requires_grad or not torch.is_grad_enabled() or _half_precision(layer, batch) is None:
        return nn.Linear.forward(layer, batch)
    output = F.linear(batch.reshape(-1, batch.shape[-1]), layer.weight, bias.detach())  # of more dimensions, a view
    shifted: Tensor = _Shifted.apply(output, bias)  # type: ignore[no-untyped-call]
    return shifted.view(*batch.shape[:-1], -1)


def _half_precision(layer: nn.Module, batch: Tensor) -> torch.dtype | None:
    """The precision in which a layer is to be computed, where the kernels know it and are faster."""
    kind = batch.device.type
    if not layer.training or kind != "cuda" or not torch.is_autocast_enabled(kind) or torch.compiler.is_compiling():
        return None
    dtype = torch.get_autocast_dtype(kind)
    is_plain = type(batch) is Tensor and batch.dtype in (torch.float32, dtype) and 0 < batch.numel() < MOST
    return dtype if is_plain and dtype in DTYPES else None


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, wants_half: bool
    ) -> tuple[Tensor, Tensor | None]:
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        y = torch.empty_like(x, dtype=torch.float32)
        half = torch.empty_like(x, dtype=dtype) if wants_half else None
        moments = x.new_empty((rows, 2), dtype=torch.float32)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, moments)
        ctx.dtype = dtype
        given = (x, int(x.dtype == torch.float32), y, half, weight, bias, moments, rows, float(eps))
        with torch.cuda.device(x.device):
            kernels_for(x.device, dtype, f"WIDTH={width}").launch("layer_norm", *_by_row(x, 16), *given)
        return y, half

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, wide: Tensor | None, half: Tensor | None) -> Any:
        x, weight, moments = ctx.saved_tensors
        wide, half = (None if each is None else each.contiguous() for each in (wide, half))
        if wide is None and half is None:
            return (None,) * 6
        width = x.shape[-1]
        result = torch.empty_like(x)
        geometry = _by_row(x, 2)
        shares = x.new_empty((geometry[0][0], 2 * width), dtype=torch.float32)
        given = (x, int(x.dtype == torch.float32), wide, half, weight, moments, result, shares, x.numel() // width)
        with torch.cuda.device(x.device):
            kernels_for(x.device, ctx.dtype, f"WIDTH={width}").launch("layer_norm_gradient", *geometry, *given)
            both = _summed(shares, ctx.dtype)
        return result, both[:width], both[width:], None, None, None


class _Shifted(Function):
    """An output to which the bias has been added already, with the gradient of the bias."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor) -> Tensor:
        ctx.mark_dirty(output)  # so that it is no view of what came in, which nobody could change in place
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, column_sums(gradient) if ctx.needs_input_grad[1] else None


def column_sums(rows: Tensor) -> Tensor:
    """The sums over all rows of numbers of two bytes, in fp32."""
    if type(rows) is not Tensor or rows.dtype not in DTYPES or torch.is_grad_enabled():
        return rows.float().flatten(0, -2).sum(0)
    rows = rows.contiguous()
    columns = rows.shape[-1]
    count, tiles = rows.numel() // columns, -(-columns // 256)
    blocks = max(1, min(-(-count // FEW), 4 * multiprocessors(rows.device) // tiles))
    shares = rows.new_empty((blocks, columns), dtype=torch.float32)
    with torch.cuda.device(rows.device):
        given = (rows, shares, count, columns // GROUP)
        kernels_for(rows.device, rows.dtype).launch("partial_sums", (blocks, tiles, 1), (32, 16), *given)
        return _summed(shares, rows.dtype)


def _summed(shares: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = shares.shape
    result = shares.new_empty(columns)
    grid = (-(-columns // 32), 1, 1)
    kernels_for(shares.device, dtype).launch("sums", grid, (32, 16), shares, result, rows, columns)
    return result


def _by_row(x: Tensor, at_once: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """A grid and its blocks: so many for each multiprocessor, if there are as many rows."""
    width = x.shape[-1]
    together = 32 if width <= 1024 else 128 if width <= 4096 else 256
    blocks = -(-x.numel() // width // (THREADS // together))
    return (max(1, min(blocks, at_once * multiprocessors(x.device))), 1, 1), (THREADS, 1)
