"""The operations that a calibration measures: every family, over sizes and precisions, none out of a tested model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One operation of one size; `make` gives the call, with its tensors made."""

    label: str
    make: Callable[[torch.device], Call]
    tf32: bool = False


GEMMS = [
    *((1, side, side, side) for side in (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)),
    *((1, rows, 5120, 1280) for rows in (1, 16, 64, 320, 1000, 4096, 16384)),
    *(
        (1, 16384, wide, deep)
        for wide, deep in ((640, 640), (2560, 640), (640, 2560), (40000, 640), (10, 640), (64, 64))
    ),
    *((1, wide, deep, 16384) for wide, deep in ((640, 640), (2560, 640), (40000, 640), (10, 640), (64, 64))),
    *((1, 4097, 513, 129), (1, 1000, 777, 333), (1, 256, 256, 65536), (1, 32768, 16, 32)),
    *((many, 512, 512, 64) for many in (1, 8, 64, 256)),
    *((many, 512, 64, 512) for many in (8, 64, 256)),
    *((64, side, side, 128) for side in (1024, 128, 32)),
]  # count, rows, columns, inner
CONVOLUTIONS = [
    *((32, 3, 192, 40, 7, 2), (32, 3, 96, 96, 8, 8), (32, 40, 56, 40, 3, 1), (32, 40, 56, 160, 1, 1)),
    *((32, 160, 56, 80, 1, 1), (32, 80, 56, 80, 3, 2), (64, 160, 28, 160, 3, 1), (64, 160, 28, 320, 1, 2)),
    *((64, 320, 14, 320, 3, 1), (64, 640, 7, 640, 3, 1), (64, 1280, 7, 320, 1, 1), (256, 24, 32, 48, 3, 1)),
    *((256, 96, 16, 96, 3, 1), (16, 48, 128, 48, 3, 1), (8, 24, 256, 24, 5, 1), (512, 40, 32, 40, 3, 1)),
    *((128, 224, 8, 224, 4, 2), (4, 3, 32, 16, 3, 1)),
]  # batch, channels, side, channels out, kernel, stride
DEPTHWISE = [(32, 96, 56, 96, 3, 1), (64, 480, 14, 480, 5, 1), (128, 192, 28, 192, 3, 2)]
HEADS = [
    *((8, 10, 256, 64), (8, 10, 512, 64), (16, 10, 1024, 64), (4, 16, 2048, 64), (2, 16, 4096, 128)),
    *((64, 4, 197, 32), (32, 6, 77, 64), (8, 20, 1024, 128), (1, 4, 128, 64)),
]  # batch, heads, length, width
ATTENTION = [(*size, causal) for size in HEADS for causal in (False, True)]
ROWS = [(16, 64), (256, 640), (2048, 640), (16384, 640), (16384, 2560), (4096, 40000), (65536, 1280)]
IMAGES = [
    (4, 16, 16),
    (64, 40, 32),
    (64, 160, 28),
    (256, 64, 32),
    (32, 80, 112),
    (256, 160, 56),
]  # batch, channels, side
NUMBERS = [2**power for power in range(10, 30, 2)]
LISTS = [(4, 10_000), (40, 10_000), (150, 1000), (150, 400_000), (40, 4_000_000), (400, 40_000)]  # tensors, elements


def cases(device: torch.device, *, quick: bool) -> list[Case]:
    """All cases, families taking turns, so that a run that is cut short has seen them all."""
    groups = [
        _gemms(device),
        _convolutions(device),
        _attention(device),
        _norms(),
        _memory(),
        _indices(),
        _lists(),
        _rnns(device),
    ]
    mixed = [case for case in chain.from_iterable(zip_longest(*groups)) if case is not None]
    return mixed[:24] if quick else mixed


def _precisions(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return ("fp32",)
    return ("bf16", "tf32", "fp32", "fp16") if torch.cuda.get_device_capability() >= (8, 0) else ("fp16", "fp32")


def _gemms(device: torch.device) -> Iterator[Case]:
    for size in _few(device, GEMMS):
        for precision in _precisions(device):
            yield Case(f"gemm {precision} {size}", partial(_gemm, size, DTYPES[precision]), precision == "tf32")


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


def _attend(size: tuple[Any, ...], dtype: torch.dtype, backward: bool, device: torch.device) -> Call:
    *shape, causal = size
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for _ in range(3))
    forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
    return _gradient(forward, (q, k, v)) if backward else forward


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


def _layer_norm(size: tuple[int, int], dtype: torch.dtype, backward: bool, device: torch.device) -> Call:
    x = torch.randn(size, device=device, dtype=dtype, requires_grad=backward)
    weight, bias = (torch.ones(size[1], device=device, dtype=dtype, requires_grad=backward) for _ in range(2))
    forward = partial(F.layer_norm, x, (size[1],), weight, bias)
    return _gradient(forward, (x, weight, bias)) if backward else forward


def _softmax(size: tuple[int, int], dtype: torch.dtype, backward: bool, device: torch.device) -> Call:
    x = torch.randn(size, device=device, dtype=dtype, requires_grad=backward)
    forward = partial(F.log_softmax, x, -1)
    return _gradient(forward, (x,)) if backward else forward


def _images(size: tuple[int, int, int], dtype: torch.dtype, backward: bool, device: torch.device) -> Any:
    batch, channels, side = size
    x = torch.randn(batch, channels, side, side, device=device, dtype=dtype, requires_grad=backward)
    return x, torch.ones(channels, device=device, requires_grad=backward), torch.zeros(channels, device=device)


def _batch_norm(size: tuple[int, int, int], dtype: torch.dtype, backward: bool, device: torch.device) -> Call:
    x, weight, bias = _images(size, dtype, backward, device)
    mean, variance = torch.zeros_like(bias), torch.ones_like(bias)
    forward = partial(F.batch_norm, x, mean, variance, weight, bias, training=True)
    return _gradient(forward, (x, weight)) if backward else forward


def _group_norm(size: tuple[int, int, int], dtype: torch.dtype, backward: bool, device: torch.device) -> Call:
    x, weight, bias = _images(size, dtype, backward, device)
    forward = partial(F.group_norm, x, 8, weight.to(dtype), bias.to(dtype))
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


def _pool(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Call:
    return partial(F.max_pool2d, _images(size, dtype, False, device)[0], 2)


def _indices() -> Iterator[Case]:
    for rows, width in ((1000, 640), (40_000, 640), (40_000, 1280)):
        for count in (64, 2048, 16_384, 131_072):
            for backward in (False, True):
                make = partial(_embedding, rows, width, count, backward)
                yield Case(f"embedding {rows, width, count} {backward=}", make)


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
        for dtype in (torch.float32, torch.float16) if device.type == "cuda" else (torch.float32,):
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


def _few(device: torch.device, sizes: list[Any]) -> list[Any]:
    """All, or where nothing is learnt from it the last, which is small."""
    return sizes if device.type == "cuda" else sizes[-1:]
