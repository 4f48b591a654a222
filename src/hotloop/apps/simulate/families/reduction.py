"""Reductions: sums, means, norms, sorting and searching.

The sum of a gradient over its rows, which is that of a bias, can take more than a hundred MiB for a moment: each block
of threads writes what it has for each thread, and the last one adds that up. So blocks are chosen here as PyTorch does.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.families.base import Family, Kind, moving, rows_of
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.need import Need, together
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_moved, bytes_of

_SORTING = ("sort", "topk", "_unique2", "unique_dim", "kthvalue", "median", "nonzero")
_THREADS, _WARP = 512, 32  # of a block at most, and that run as one
_PER_SM = 2048  # threads that a multiprocessor holds
_LEAST, _MOST = 16, 256  # numbers that a thread should add up
_VECTOR = 4  # results that a thread makes at once, at most
_INDEXED = 2**31  # bytes that one kernel can point into
_LARGE = 2**20  # numbers: what has fewer takes next to nothing


def _work(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    variant = _variant(operation)
    traits = rows_of(operation.inputs[0]) if variant != "all" else ()
    if kind.base in _SORTING:
        return moving(operation, kind, *sorting(operation), variant=variant, traits=traits)
    twice = bytes_of(operation.inputs) > 1 << 22 and bytes_of(operation.outputs) <= 16
    return moving(operation, kind, kernels=2 if twice else 1, variant=variant, traits=traits)


def _variant(operation: Operation) -> str:
    """All, rows (the last dimension goes) or columns (it stays)."""
    image, *_ = operation.inputs
    if not operation.outputs or operation.outputs[0].numel <= 1:
        return "all"
    last = len(image.sizes) - 1
    over = operation.arguments.get("dim")
    over = [over] if isinstance(over, int) else over or range(last + 1)
    return "rows" if last in [number % (last + 1) for number in over] else "columns"


def sorting(operation: Operation) -> tuple[float, int]:
    """Bytes and kernels of passes over digits."""
    return 8.0 * bytes_moved(operation), 8


def _summed(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """What a sum or a mean over some dimensions takes."""
    x = operation.inputs[0]
    over = operation.arguments.get("dim")
    if x.numel < _LARGE or over is None or not operation.outputs:
        return ()
    return buffers(x, [over] if isinstance(over, int) else over, card)


class _Dimension(NamedTuple):
    size: int
    stride: int  # of the input, in numbers
    result: int  # of the result; 0: it is added up


def buffers(x: Shape, over: Sequence[int], card: Card) -> tuple[Need, ...]:
    """The buffer of partial sums and the counters of blocks that are done."""
    dimensions = _dimensions(x, over)
    reduced = sum(each.result == 0 for each in dimensions)
    if not reduced:
        return ()
    accumulator = max(4, x.itemsize)
    results = prod(each.size for each in dimensions[reduced:])
    numbers = prod(each.size for each in dimensions[:reduced])
    inner = reduced == len(dimensions) or dimensions[0].stride < dimensions[reduced].stride  # it adds up neighbours
    vector = 1
    if not inner and dimensions[reduced].stride == 1:
        vector = _vector(dimensions, reduced)
    wide, high = (numbers, results) if inner else (results // vector, numbers)
    width, height = _block(wide, high, _THREADS // vector)
    per_step, results_per_block = (width, 1) if inner else (1, width)
    if -(-numbers // per_step) >= min(16 * height, _MOST):
        per_step *= height
    else:
        return ()  # warps share no result, so that blocks do not either
    blocks = -(-(results // vector) // results_per_block)
    each = -(-numbers // per_step)
    wanted = card.sms * (_PER_SM // (width * height))
    if each < _MOST or blocks > wanted:
        return ()
    parts = max(min(-(-wanted // blocks), -(-each // _LEAST)), -(-each // _MOST))
    if parts <= 1:
        return ()
    partial = accumulator * results * parts * (1 if inner else width * vector)
    return together([Need(partial, "partial sums"), Need(4 * blocks, "counters of blocks")])


def _block(wide: int, high: int, threads: int) -> tuple[int, int]:
    """Threads of a block, along what lies together and across."""
    wide, high = (min(1 << (size.bit_length() - 1), threads) for size in (max(wide, 1), max(high, 1)))
    height = min(high, threads // min(wide, _WARP))
    return min(wide, threads // height), height


def _vector(dimensions: list[_Dimension], first: int) -> int:
    """Results that a thread makes at once: as many as all steps can be divided by."""
    steps = [dimensions[first].size, *(each.stride for i, each in enumerate(dimensions) if i != first)]
    return next(by for by in (_VECTOR, 2, 1) if all(step % by == 0 for step in steps))


def _dimensions(x: Shape, over: Sequence[int]) -> list[_Dimension]:
    """Those that are added up first, then the others, each from the nearest; what lies in one piece is one."""
    strides = x.strides or _contiguous(x.sizes)
    reduced = {axis % len(x.sizes) for axis in over} or set(range(len(x.sizes)))
    kept = _contiguous([1 if axis in reduced else size for axis, size in enumerate(x.sizes)])
    found = [
        _Dimension(size, stride, 0 if axis in reduced else kept[axis])
        for axis, (size, stride) in enumerate(zip(_pointed(x, strides), strides, strict=True))
        if size > 1
    ]
    merged: list[_Dimension] = []
    for each in sorted(found, key=lambda each: (each.result != 0, each.stride)):
        last = merged[-1] if merged else None
        if last and (last.result == 0) == (each.result == 0) and each[1:] == tuple(last.size * n for n in last[1:]):
            merged[-1] = last._replace(size=last.size * each.size)
        else:
            merged.append(each)
    return merged


def _pointed(x: Shape, strides: Sequence[int]) -> list[int]:
    """The sizes of what one kernel adds up: of what is too large, halves of the dimension that reaches farthest."""
    sizes = [*x.sizes]
    while sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) * x.itemsize >= _INDEXED:
        axis = max(range(len(sizes)), key=lambda i: (sizes[i] - 1) * strides[i])
        sizes[axis] = -(-sizes[axis] // 2)
    return sizes


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _sort(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    return (Need(sum(shape.nbytes for shape in operation.outputs), "buffers of a sort"),)


FAMILY = Family(
    members={
        "reduction": "sum mean prod amax amin aminmax max min argmax argmin any all var std var_mean std_mean norm"
        " nansum linalg_vector_norm logsumexp cumsum cumprod cummax cummin count_nonzero median nanmedian mode sort"
        " topk kthvalue unique_dim _unique2 unique_consecutive nonzero masked_select histc bincount equal bucketize"
        " searchsorted _weight_norm_interface _weight_norm_interface_backward _cdist_forward _cdist_backward trace",
    },
    work={"reduction": _work},
    needs={**dict.fromkeys(("sum", "mean", "nansum", "linalg_vector_norm", "norm"), _summed), "sort": _sort},
)
