"""`F.layer_norm`, and the gradients of the biases of `F.linear` and `torch.addmm`, at the speed of the memory."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hotloop._torch import saves_through_hooks, version_of
from hotloop.kernels.images import multiprocessors, readable
from hotloop.kernels.nvrtc import HALVES, kernels_of

GROUP = 8  # numbers that a thread reads at once
WIDEST_ROW = 8192  # row that the threads of a block hold
THREADS = 256
FEW_ROWS = 64  # rows that a block sums at least
COUNTABLE = 2**31  # numbers

_SOURCE = Path(__file__).with_name("rows.cu")
kernels_for = partial(kernels_of, _SOURCE)
_PLAIN = torch.contiguous_format
_HALF = "_hotloop_half"  # where the output of a normalisation has its copy in two bytes


class RowKernels(TorchFunctionMode):
    """Functions that are called in here by whatever layer use the kernels, where autocast and autograd are on."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = _OWN.get(func)
        result = None if own is None else own(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


def prepare_rows(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels that a model will probably need, beside whatever is done meanwhile."""
    for macros in ((), *((f"WIDTH={width}",) for width in _widths(model))):
        kernels_for(device, dtype, *macros).compile_beside()


def _widths(model: nn.Module) -> set[int]:
    """The lengths of rows that are normalised by layers that can be told by their names."""
    layers = [layer for layer in model.modules() if "LayerNorm" in type(layer).__name__]
    weights = [weight for layer in layers if isinstance(weight := getattr(layer, "weight", None), Tensor)]
    return {len(weight) for weight in weights if weight.dim() == 1 and _is_wide_enough(len(weight))}


# ruff: noqa: A002
# They are called as PyTorch's functions are, with the names of their arguments.


def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor | None:
    """Rows, normalised; None where the kernels do not know how.

    Autocast gives them in fp32, and each linear layer after it makes a copy in two bytes. The kernel writes it as well.
    """
    dtype = _half_precision(input)
    if dtype is None or tuple(normalized_shape) != input.shape[-1:] or not _is_wide_enough(input.shape[-1]):
        return None
    if not all(each is None or _is_parameter(each, input) for each in (weight, bias)):
        return None
    y, half = _LayerNorm.apply(input, weight, bias, float(eps), dtype)  # type: ignore[no-untyped-call]
    setattr(y, _HALF, (half, version_of(y)))
    return y  # type: ignore[no-any-return]


def linear(input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """The matmul with the weights, and a bias whose gradient the kernels sum; None where they do not."""
    if _half_precision(input) is None:
        return None
    half, version = getattr(input, _HALF, (input, None))
    rows: Tensor = half if version == version_of(input) else input
    if not _is_shift(bias, input):
        return None if rows is input else F.linear(rows, weight, bias)
    output = F.linear(rows.reshape(-1, rows.shape[-1]), weight, bias.detach())  # of more dimensions, a view
    return _shifted(output, bias).view(*input.shape[:-1], -1)


def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Tensor | None:
    """The same by the function that some libraries use for it."""
    if out is not None or (beta, alpha) != (1, 1) or _half_precision(mat1) is None or not _is_shift(input, mat1):
        return None
    return _shifted(torch.addmm(input.detach(), mat1, mat2), input)


_OWN: dict[Any, Callable[..., Tensor | None]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.linear: linear,
    torch.addmm: addmm,
}


def _shifted(output: Tensor, bias: Tensor) -> Tensor:
    return _Shifted.apply(output, bias)  # type: ignore[no-any-return, no-untyped-call]


def _half_precision(x: Any) -> torch.dtype | None:
    """The precision of two bytes in which a function of x is to be computed; None where the kernels do not do it."""
    if type(x) is not Tensor or not x.is_cuda or not 0 < x.numel() < COUNTABLE or not torch.is_autocast_enabled("cuda"):
        return None
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or saves_through_hooks():
        return None  # evaluated, read by a compiler, or to be computed again, which is done without the kernels
    dtype = torch.get_autocast_dtype("cuda")
    return dtype if dtype in HALVES and x.dtype in (torch.float32, dtype) else None


def _is_wide_enough(width: int) -> bool:
    return width % GROUP == 0 and 0 < width <= WIDEST_ROW


def _is_shift(bias: Any, beside: Tensor) -> bool:
    """Whether it is a bias that learns."""
    return bias is not None and bias.requires_grad and len(bias) % GROUP == 0 and _is_parameter(bias, beside)


def _is_parameter(tensor: Any, beside: Tensor) -> bool:
    """Whether it is a vector of fp32 that the kernels can read where it lies."""
    if not isinstance(tensor, nn.Parameter) or tensor.dim() != 1 or tensor.dtype != torch.float32:
        return False
    return tensor.device == beside.device and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        x = readable(x, _PLAIN)
        width = x.shape[-1]
        rows = x.numel() // width
        y = torch.empty_like(x, dtype=torch.float32)
        half = torch.empty_like(x, dtype=dtype)
        moments = x.new_empty((rows, 2), dtype=torch.float32)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, moments)
        ctx.dtype = dtype
        given = (x, int(x.dtype == torch.float32), y, half, weight, bias, moments, rows, eps)
        with torch.cuda.device(x.device):
            kernels_for(x.device, dtype, f"WIDTH={width}").launch("layer_norm", *_by_row(x, 16), *given)
        return y, half

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, wide: Tensor | None, half: Tensor | None) -> Any:
        x, weight, moments = ctx.saved_tensors
        wide, half = (None if each is None else readable(each, _PLAIN) for each in (wide, half))
        if wide is None and half is None:
            return (None,) * 5
        width = x.shape[-1]
        result = torch.empty_like(x)
        geometry = _by_row(x, 2)
        shares = x.new_empty((geometry[0][0], 2 * width), dtype=torch.float32)
        given = (x, int(x.dtype == torch.float32), wide, half, weight, moments, result, shares, x.numel() // width)
        with torch.cuda.device(x.device):
            kernels_for(x.device, ctx.dtype, f"WIDTH={width}").launch("layer_norm_gradient", *geometry, *given)
            both = _summed(shares, ctx.dtype)
        for_weight, for_bias = (
            part if needs else None for part, needs in zip(both.split(width), ctx.needs_input_grad[1:3], strict=True)
        )
        return result, for_weight, for_bias, None, None


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
    if type(rows) is not Tensor or rows.dtype not in HALVES or torch.is_grad_enabled():
        return rows.float().flatten(0, -2).sum(0)
    rows = readable(rows, _PLAIN)
    columns = rows.shape[-1]
    count, tiles = rows.numel() // columns, -(-columns // 256)
    blocks = max(1, min(-(-count // FEW_ROWS), 4 * multiprocessors(rows.device) // tiles))
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
