"""The operations that a calibration measures: every family, over sizes and precisions, none out of a tested model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibration_sizes import (
    ATTENTION,
    BATCHES,
    CONVOLUTIONS,
    DEPTHWISE,
    GEMMS,
    GROUPED,
    IMAGES,
    LAYERS,
    LISTS,
    MASKED,
    NUMBERS,
    POOLED,
    PRODUCTS,
    RECURRENT,
    ROWS,
    SCORES,
    SEPARATE,
    SUMS,
    VOCABULARIES,
    WIDTHS,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One operation of one size; `make` gives the call, with its tensors made."""

    label: str
    make: Callable[[torch.device], Call]
    tf32: bool = False


def cases(device: torch.device, *, quick: bool) -> list[Case]:
    """All cases, families taking turns, so that a run that is cut short has seen them all."""
    mixed = [case for case in chain.from_iterable(zip_longest(*_groups(device))) if case is not None]
    return mixed[:24] if quick else mixed


def _groups(device: torch.device) -> list[Iterator[Case]]:
    return [
        _gemms(device),
        _convolutions(device),
        _attention(device),
        _norms(),
        _memory(),
        _indices(),
        _lists(),
        _rnns(device),
        *(_later() if device.type != "cpu" else ()),
    ]


def _later() -> list[Iterator[Case]]:
    later = [_layers(), _products(), _masked(), _widths(), _batches(), _moved(), _recurrent()]
    return [*later, _vocabularies(), _put()]


def _precisions(device: torch.device) -> tuple[str, ...]:
    """Those that a device has; all on meta, where nothing is computed."""
    if device.type == "cpu":
        return ("fp32",)
    able = device.type == "meta" or torch.cuda.get_device_capability() >= (8, 0)
    return ("bf16", "tf32", "fp32", "fp16") if able else ("fp16", "fp32")


def _gemms(device: torch.device) -> Iterator[Case]:
    for size in _few(device, GEMMS):
        for precision in _precisions(device):
            yield Case(f"gemm {precision} {size}", partial(_gemm, size, DTYPES[precision]), precision == "tf32")


def _products() -> Iterator[Case]:
    for size in PRODUCTS:
        for precision in ("bf16", "fp32", "tf32"):
            yield Case(f"gemm {precision} {size}", partial(_gemm, size, DTYPES[precision]), precision == "tf32")


def _vocabularies() -> Iterator[Case]:
    """The last layer of a language model and its gradients, each with its operands as they lie then."""
    for size in VOCABULARIES:
        for precision in ("bf16", "fp32", "tf32"):
            for which in ("forward", "input", "weight"):
                make = partial(_head, size, which, DTYPES[precision])
                yield Case(f"head {which} {precision} {size}", make, precision == "tf32")


def _head(size: tuple[int, int, int], which: str, dtype: torch.dtype, device: torch.device) -> Call:
    tokens, width, words = size
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(words, width, device=device, dtype=dtype)
    if which == "forward":
        return partial(torch.mm, x, weight.t())
    gradient = torch.randn(tokens, words, device=device, dtype=dtype)
    return partial(torch.mm, gradient, weight) if which == "input" else partial(torch.mm, gradient.t(), x)


def _gemm(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Call:
    count, rows, columns, inner = size
    a = torch.randn(count, rows, inner, device=device, dtype=dtype)
    b = torch.randn(count, columns, inner, device=device, dtype=dtype).mT  # as a layer's weight lies
    return partial(torch.bmm, a, b) if count > 1 else partial(torch.mm, a[0], b[0])


def _convolutions(device: torch.device) -> Iterator[Case]:
    sizes = [*((size, size[1]) for size in DEPTHWISE), *((size, 1) for size in CONVOLUTIONS)]
    for size, groups in _few(device, sizes):
        for precision in _precisions(device):
            for last in (False, True):
                for which in ("forward", "input", "weight"):
                    make = partial(_convolution, size, groups, DTYPES[precision], last, which)
                    yield Case(f"conv {which} {precision} {size} {last=}", make, precision == "tf32")


def _layers() -> Iterator[Case]:
    """The ways in which most trainings convolve; the gradient of an image itself is never asked for."""
    sizes = [*((size, 1) for size in LAYERS), *((size, size[1]) for size in SEPARATE)]
    for size, groups in sizes:
        for precision, last in (("tf32", False), ("bf16", True), ("bf16", False), ("tf32", True)):
            for which in ("forward", "weight") if size[1] == 3 else ("forward", "input", "weight"):
                make = partial(_convolution, size, groups, DTYPES[precision], last, which)
                yield Case(f"conv {which} {precision} {size} {last=}", make, precision == "tf32")


def _convolution(
    size: tuple[int, ...], groups: int, dtype: torch.dtype, last: bool, which: str, device: torch.device
) -> Call:
    batch, channels, side, out, kernel, stride = size
    order = torch.channels_last if last else torch.contiguous_format
    images = torch.randn(batch, channels, side, side, device=device, dtype=dtype).to(memory_format=order)
    weight = torch.randn(out, channels // groups, kernel, kernel, device=device, dtype=dtype).to(memory_format=order)
    padding = kernel // 2 if stride < kernel else 0
    settings = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    forward = partial(torch.ops.aten.convolution.default, images, weight, None, *settings)
    if which == "forward":
        return forward
    gradient = torch.randn_like(forward())
    mask = [which == "input", which == "weight", False]
    return partial(torch.ops.aten.convolution_backward.default, gradient, images, weight, None, *settings, mask)


def _attention(device: torch.device) -> Iterator[Case]:
    for size in _few(device, ATTENTION):
        for precision in _precisions(device):
            for backward in (False, True):
                make = partial(_attend, size, DTYPES[precision], backward)
                yield Case(f"attention {precision} {size} {backward=}", make, precision == "tf32")


def _masked() -> Iterator[Case]:
    for size in MASKED:
        for precision in ("bf16", "fp32"):
            for how in ("dropped", "masked"):
                for backward in (False, True):
                    make = partial(_attend, (*size, how == "dropped"), DTYPES[precision], backward, how=how)
                    yield Case(f"attention {how} {precision} {size} {backward=}", make)


def _attend(size: tuple[Any, ...], dtype: torch.dtype, backward: bool, device: torch.device, how: str = "") -> Call:
    *shape, causal = size
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for _ in range(3))
    dropout = 0.1 if how == "dropped" else 0.0
    mask = torch.zeros(shape[0], 1, shape[2], shape[2], device=device, dtype=dtype) if how == "masked" else None
    forward = partial(F.scaled_dot_product_attention, q, k, v, mask, dropout, causal)
    if device.type == "meta":  # which knows no choice of kernels: a card takes these
        forward = partial(_chosen, q, k, v, mask, dropout, causal)
    return _gradient(forward, (q, k, v)) if backward else forward


def _chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> Tensor:
    output: Tensor
    if mask is None and q.dtype != torch.float32:
        output = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, dropout, causal)[0]
    else:
        bias = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
        output = torch.ops.aten._scaled_dot_product_efficient_attention.default(q, k, v, bias, True, dropout, causal)[0]
    return output


def _gradient(forward: Call, inputs: tuple[Tensor, ...]) -> Call:
    """The backward pass alone, as often as one likes."""
    with torch.enable_grad():
        result = forward()
    return partial(torch.autograd.grad, result, inputs, torch.randn_like(result), retain_graph=True)


def _norms() -> Iterator[Case]:
    for backward in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            for size in ROWS:
                for name, call in (("layer", _layer_norm), ("softmax", _softmax)):
                    yield Case(f"{name} {dtype} {size} {backward=}", partial(call, size, dtype, backward))
            for size in IMAGES:
                for name, call in (("batch", _batch_norm), ("group", _group_norm)):
                    yield Case(f"{name} {dtype} {size} {backward=}", partial(call, size, dtype, backward))


def _widths() -> Iterator[Case]:
    for backward in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            for size in WIDTHS:
                yield Case(f"layer {dtype} {size} {backward=}", partial(_layer_norm, size, dtype, backward))
            for size in SCORES:
                yield Case(f"softmax {dtype} {size} {backward=}", partial(_softmax, size, dtype, backward))
            for size in WIDTHS[2:6]:
                yield Case(f"rms {dtype} {size} {backward=}", partial(_rms_norm, size, dtype, backward))


def _rms_norm(size: tuple[int, int], dtype: torch.dtype, backward: bool, device: torch.device) -> Call:
    x = torch.randn(size, device=device, dtype=dtype, requires_grad=backward)
    weight = torch.ones(size[1], device=device, dtype=dtype, requires_grad=backward)
    forward = partial(F.rms_norm, x, (size[1],), weight)
    return _gradient(forward, (x, weight)) if backward else forward


def _batches() -> Iterator[Case]:
    for backward in (False, True):
        for dtype, last in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
            for size in BATCHES:
                make = partial(_batch_norm, size, dtype, backward, last=last)
                yield Case(f"batch {dtype} {size} {last=} {backward=}", make)
            for size in GROUPED if not last else ():
                yield Case(
                    f"group of 32 {dtype} {size} {backward=}", partial(_group_norm, size, dtype, backward, groups=32)
                )
            for *image, window in POOLED:
                make = partial(_pool, tuple(image), dtype, window=window, last=last, backward=backward)
                yield Case(f"max pool {dtype} {image} {window=} {last=} {backward=}", make)


def _layer_norm(size: tuple[int, int], dtype: torch.dtype, backward: bool, device: torch.device) -> Call:
    x = torch.randn(size, device=device, dtype=dtype, requires_grad=backward)
    weight, bias = (torch.ones(size[1], device=device, dtype=dtype, requires_grad=backward) for _ in range(2))
    forward = partial(F.layer_norm, x, (size[1],), weight, bias)
    return _gradient(forward, (x, weight, bias)) if backward else forward


def _softmax(size: tuple[int, int], dtype: torch.dtype, backward: bool, device: torch.device) -> Call:
    x = torch.randn(size, device=device, dtype=dtype, requires_grad=backward)
    forward = partial(F.log_softmax, x, -1)
    return _gradient(forward, (x,)) if backward else forward


def _images(
    size: tuple[int, int, int], dtype: torch.dtype, backward: bool, device: torch.device, *, last: bool = False
) -> Any:
    batch, channels, side = size
    x = torch.randn(batch, channels, side, side, device=device, dtype=dtype)
    x = x.to(memory_format=torch.channels_last if last else torch.contiguous_format).requires_grad_(backward)
    return x, torch.ones(channels, device=device, requires_grad=backward), torch.zeros(channels, device=device)


def _batch_norm(
    size: tuple[int, int, int], dtype: torch.dtype, backward: bool, device: torch.device, *, last: bool = False
) -> Call:
    x, weight, bias = _images(size, dtype, backward, device, last=last)
    mean, variance = torch.zeros_like(bias), torch.ones_like(bias)
    forward = partial(F.batch_norm, x, mean, variance, weight, bias, training=True)
    return _gradient(forward, (x, weight)) if backward else forward


def _group_norm(
    size: tuple[int, int, int], dtype: torch.dtype, backward: bool, device: torch.device, *, groups: int = 8
) -> Call:
    x, weight, bias = _images(size, dtype, backward, device)
    forward = partial(F.group_norm, x, groups, weight.to(dtype), bias.to(dtype))
    return _gradient(forward, (x, weight)) if backward else forward


def _memory() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for number in NUMBERS:
            for name, call in _OF_NUMBERS.items():
                yield Case(f"{name} {dtype} {number}", partial(_of_numbers, call, number, dtype))
        for size in IMAGES:
            yield Case(f"max pool {dtype} {size}", partial(_pool, size, dtype))


_OF_NUMBERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": torch.add,
    "relu": lambda x, _: torch.relu(x),
    "gelu": lambda x, _: F.gelu(x),
    "sum": lambda x, _: x.sum(),
    "sum of rows": lambda x, _: x.view(-1, 256).sum(1),
    "sum of columns": lambda x, _: x.view(-1, 256).sum(0),
    "clone": lambda x, _: x.clone(),
    "cast": lambda x, _: x.to(torch.float16),
    "transpose": lambda x, _: x.view(-1, 256).t().contiguous(),
    "dropout": lambda x, _: torch.native_dropout(x, 0.1, True),
    "normal": lambda x, _: x.normal_(),
    "zero": lambda x, _: x.zero_(),
}


def _of_numbers(call: Callable[[Tensor, Tensor], Any], number: int, dtype: torch.dtype, device: torch.device) -> Call:
    x, y = (torch.randn(number, device=device, dtype=dtype) for _ in range(2))
    return partial(call, x, y)


def _pool(
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    window: int = 2,
    last: bool = False,
    backward: bool = False,
) -> Call:
    images = _images(size, dtype, backward, device, last=last)[0]
    forward = partial(F.max_pool2d, images, window, 2, window // 3)
    return _gradient(forward, (images,)) if backward else forward


def _moved() -> Iterator[Case]:
    """Casts, sums and copies as trainings have them."""
    for number in (2**20, 2**22, 2**24, 2**26, 3 * 2**22):
        for source, target in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            yield Case(f"cast {source} to {target} {number}", partial(_cast, number, source, target))
    for dtype in (torch.float32, torch.bfloat16):
        for size in SUMS:
            yield Case(f"sum over rows {dtype} {size}", partial(_sum, size, (0,), dtype))
        for size in ((48, 64, 48, 48), (24, 128, 80, 80), (48, 512, 12, 12)):
            yield Case(f"sum over images {dtype} {size}", partial(_sum, size, (0, 2, 3), dtype))
        for heads in ((16, 512, 12, 64), (48, 96, 8, 64)):
            yield Case(f"heads {dtype} {heads}", partial(_heads, heads, dtype))
        for size in ((48, 64, 48), (48, 3, 160)):
            yield Case(f"last {dtype} {size}", partial(_reorder, size, dtype))
    for rows, width, count in ((50_001, 768, 6144), (30_001, 512, 12_288), (10_000, 1024, 3072)):
        for backward in (False, True):
            yield Case(f"embedding {rows, width, count} {backward=}", partial(_embedding, rows, width, count, backward))


def _cast(number: int, source: torch.dtype, target: torch.dtype, device: torch.device) -> Call:
    return partial(torch.ones(number, device=device, dtype=source).to, target)


def _sum(size: tuple[int, ...], over: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Call:
    return partial(torch.sum, torch.ones(size, device=device, dtype=dtype), over)


def _heads(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Call:
    return torch.ones(size, device=device, dtype=dtype).transpose(1, 2).contiguous


def _reorder(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Call:
    images = torch.ones(*size, size[-1], device=device, dtype=dtype)
    return partial(images.contiguous, memory_format=torch.channels_last)


def _indices() -> Iterator[Case]:
    for rows, width in ((1000, 640), (40_000, 640), (40_000, 1280)):
        for count in (64, 2048, 16_384, 131_072):
            for backward in (False, True):
                make = partial(_embedding, rows, width, count, backward)
                yield Case(f"embedding {rows, width, count} {backward=}", make)


def _put() -> Iterator[Case]:
    """The gradients of elements that were picked: pairs of columns of matrices, or rows."""
    for rows, side, count in ((4096, 20, 150), (32768, 24, 250), (16384, 40, 600)):
        yield Case(f"put pairs {rows, side, count}", partial(_put_pairs, rows, side, count))
    for rows, width, count in ((40_000, 256, 16_384), (10_000, 640, 50_000)):
        yield Case(f"put rows {rows, width, count}", partial(_put_rows, rows, width, count))


def _put_pairs(rows: int, side: int, count: int, device: torch.device) -> Call:
    first, second = (torch.randint(side, (count,), device=device) for _ in range(2))
    values, zeros = torch.ones(rows, count, device=device), torch.zeros(rows, side, side, device=device)
    return partial(torch.ops.aten.index_put.default, zeros, [None, first, second], values, True)


def _put_rows(rows: int, width: int, count: int, device: torch.device) -> Call:
    index = torch.randint(rows, (count,), device=device)
    values, zeros = torch.ones(count, width, device=device), torch.zeros(rows, width, device=device)
    return partial(torch.ops.aten.index_put.default, zeros, [index], values, True)


def _embedding(rows: int, width: int, count: int, backward: bool, device: torch.device) -> Call:
    indices = torch.randint(rows, (count,), device=device)
    if not backward:
        return partial(F.embedding, indices, torch.randn(rows, width, device=device))
    gradient = torch.randn(count, width, device=device)
    return partial(torch.ops.aten.embedding_dense_backward.default, gradient, indices, rows, -1, False)


def _lists() -> Iterator[Case]:
    for count, number in LISTS:
        for name, call in (
            ("add", _foreach_add),
            ("addcdiv", _foreach_addcdiv),
            ("sqrt", _foreach_sqrt),
            ("fused", _fused),
        ):
            yield Case(f"list {name} of {count} × {number}", partial(call, count, number))


def _tensors(lists: int, count: int, number: int, device: torch.device) -> list[list[Tensor]]:
    return [[torch.ones(number, device=device) for _ in range(count)] for _ in range(lists)]


def _foreach_add(count: int, number: int, device: torch.device) -> Call:
    return partial(torch._foreach_add_, *_tensors(2, count, number, device))


def _foreach_addcdiv(count: int, number: int, device: torch.device) -> Call:
    return partial(torch._foreach_addcdiv_, *_tensors(3, count, number, device), value=1e-9)


def _foreach_sqrt(count: int, number: int, device: torch.device) -> Call:
    return partial(torch._foreach_sqrt, *_tensors(1, count, number, device))


def _fused(count: int, number: int, device: torch.device) -> Call:
    steps = [torch.ones((), device=device) for _ in range(count)]
    settings = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    lists = _tensors(4, count, number, device)
    return partial(torch._fused_adam_, *lists, [], steps, **settings, amsgrad=False, maximize=False)


def _rnns(device: torch.device) -> Iterator[Case]:
    for batch, length, width in ((8, 16, 64), (32, 64, 160), (64, 128, 320), (64, 32, 1280)):
        for dtype in (torch.float32, torch.float16) if device.type != "cpu" else (torch.float32,):
            for backward in (False, True):
                yield Case(
                    f"lstm {dtype} {batch, length, width} {backward=}",
                    partial(_lstm, batch, length, width, dtype, backward),
                )


def _lstm(batch: int, length: int, width: int, dtype: torch.dtype, backward: bool, device: torch.device) -> Call:
    model = nn.LSTM(width, width, batch_first=True, device=device, dtype=dtype)
    x = torch.randn(batch, length, width, device=device, dtype=dtype, requires_grad=backward)
    state = tuple(torch.zeros(1, batch, width, device=device, dtype=dtype) for _ in range(2))

    def forward() -> Tensor:
        output: Tensor = model(x, state)[0]
        return output

    return _gradient(forward, (x, *model.parameters())) if backward else forward


def _recurrent() -> Iterator[Case]:
    for size in RECURRENT:
        for backward in (False, True):
            yield Case(f"recurrent {size} {backward=}", partial(_cells, size, backward))


def _cells(size: tuple[Any, ...], backward: bool, device: torch.device) -> Call:
    """As in training: what the backward pass needs is kept, whether it is measured or not."""
    kind, batch, length, width, layers, both = size
    model = getattr(nn, kind)(width, width, layers, batch_first=True, bidirectional=both, device=device)
    x = torch.randn(batch, length, width, device=device, requires_grad=True)

    def forward() -> Tensor:
        with torch.enable_grad():
            output: Tensor = model(x)[0]
        return output

    return _gradient(forward, (x, *model.parameters())) if backward else forward


def _few(device: torch.device, sizes: list[Any]) -> list[Any]:
    """All, or where nothing is learnt from it the last, which is small."""
    return sizes if device.type != "cpu" else sizes[-1:]
