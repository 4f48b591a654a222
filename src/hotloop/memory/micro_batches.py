"""A batch in micro-batches: what has a row for each item is cut, everything else goes with every micro-batch."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hotloop._torch import accumulated_hooks
from hotloop.errors import BadArgument, DoesNotFit, HotloopError
from hotloop.plan import Split
from hotloop.printing.text import an
from hotloop.values.tree import map_leaves, map_tensors, parts_of, tensors_in, with_parts

HOW_TO_SAY = (
    "return (loss, weight) from an objective, weight being what the loss is the mean over; or say how a batch is cut:"
    " split=1 where time comes first, split=function with (batch, start, stop) → part or (part, weight); or accept what"
    ' differs with split="items"'
)


def micro_batches_of(
    batch: Any, items: int, size: int, split: Any = "auto"
) -> Iterator[tuple[Any, int, int | float | Tensor | None]]:
    """A batch in even micro-batches of at most `size` items, cut as a plan says: each with its items and its weight.

    The weight is None where the plan does not say it.

    >>> import torch
    >>> [count for part, count, _ in micro_batches_of({"x": torch.zeros(10, 2), "scale": 3.0}, items=10, size=4)]
    [4, 3, 3]
    """
    for start, stop in [(0, items)] if size >= items else bounds(items, size):
        part, weight = part_of(batch, items, slice(start, stop), split)
        yield part, stop - start, weight


def part_of(batch: Any, items: int, rows: slice, split: Any = "auto") -> tuple[Any, int | float | Tensor | None]:
    """Some of the items of a batch, cut as a plan says, and what they weigh; None where the plan does not say that.

    >>> import torch
    >>> part, _ = part_of((torch.zeros(7, 4, 2), torch.zeros(4)), 4, slice(0, 3), split=1)  # time first
    >>> [tuple(tensor.shape) for tensor in part]
    [(7, 3, 2), (3,)]
    """
    if rows.start == 0 and rows.stop == items:
        return batch, None
    if callable(split):
        part = split(batch, rows.start, rows.stop)
        weighed = isinstance(part, tuple) and len(part) == 2 and type(part[0]) is type(batch)
        if weighed and (isinstance(part[1], int | float) or (isinstance(part[1], Tensor) and not part[1].dim())):
            return part[0], part[1]
        return part, None
    if isinstance(split, int):
        return _cut_along(batch, items, rows, split), None
    return rows_of(batch, items, rows), None


def items_along(batch: Any, split: Any) -> int:
    """How many items a batch holds, where a plan says in which dimension they are, or how they are cut."""
    if callable(split):
        count: Callable[[Any], int] = getattr(split, "items", count_items)
        return count(batch)
    if not isinstance(split, int):
        return count_items(batch)
    sizes = Counter(tensor.size(split) for _, tensor in tensors_in(batch) if tensor.dim() > split)
    if not sizes:
        raise BadArgument(
            f"split={split}, and no tensor of the batch has so many dimensions",
            fix="give the dimension that holds the items, from 0, or a function (batch, start, stop) → part",
        )
    return sizes.most_common(1)[0][0]


def _cut_along(value: Any, items: int, rows: slice, dim: int) -> Any:
    """A part of a batch whose items lie along another dimension; what has one value for each item is cut too."""

    def lists_items(part: Any) -> bool:
        return _is_list(part) and len(part) == items and not any(True for _ in tensors_in(part))

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            along = next((each for each in (dim, 0) if leaf.dim() > each and leaf.size(each) == items), None)
            return leaf if along is None else leaf.narrow(along, rows.start, rows.stop - rows.start)
        return leaf[rows] if lists_items(leaf) else leaf

    return map_leaves(value, cut, lists_items)


def rows_of(batch: Any, items: int, rows: slice | Sequence[int]) -> Any:
    """Some of the items of a batch, or some of them several times; the batch itself where a slice has all.

    >>> import torch
    >>> rows_of({"x": torch.tensor([7, 8, 9]), "name": ["a", "b", "c"], "scale": 2.0}, 3, [0, 1, 2, 0])
    {'x': tensor([7, 8, 9, 7]), 'name': ['a', 'b', 'c', 'a'], 'scale': 2.0}
    """
    if isinstance(rows, slice) and rows.start == 0 and rows.stop == items:
        return batch
    in_lists = _lists_items(batch)

    def lists_items(part: Any) -> bool:  # a name, a path or a number for each item
        if not _is_list(part) or len(part) != items:
            return False
        inner = (tensor for item in part for _, tensor in tensors_in(item))
        return not any(tensor.dim() and tensor.size(0) == items for tensor in inner)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _tensor_rows(leaf, rows) if leaf.dim() and leaf.size(0) == items else leaf
        if isinstance(leaf, np.ndarray):
            return leaf[rows] if leaf.ndim and len(leaf) == items else leaf
        if lists_items(leaf):
            return _list_rows(leaf, rows)
        if callable(getattr(leaf, "to", None)) and not isinstance(leaf, type):  # it holds tensors in a way of its own
            raise BadArgument(
                f"a batch that holds {an(type(leaf).__name__)} cannot be cut into micro-batches or made larger",
                fix="build it inside the model or the objective, or use a smaller batch; or say how it is cut:"
                " split=function, a function (batch, start, stop) → part",
            )
        return leaf

    def cut_field(field: Any) -> Any:
        is_items = in_lists and _is_list(field) and len(field) == items
        return _list_rows(field, rows) if is_items else map_leaves(field, cut, lists_items)

    return with_parts(batch, cut_field) if in_lists else cut_field(batch)


def _tensor_rows(tensor: Tensor, rows: slice | Sequence[int]) -> Tensor:
    if isinstance(rows, slice) and tensor.layout == torch.strided:
        return tensor[rows]
    numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows
    return tensor.index_select(0, torch.tensor(numbers, device=tensor.device))  # a sparse one has no views


def _list_rows(value: Any, rows: slice | Sequence[int]) -> Any:
    return value[rows] if isinstance(rows, slice) else type(value)(value[number] for number in rows)


def check_cut(parameters: Sequence[nn.Parameter], split: Split, differs: str | None, *, asked: int | None) -> None:
    """Refuse micro-batches that would be another training; `asked`: their size, where the person gave it."""
    error: type[HotloopError] = DoesNotFit if asked is None else BadArgument
    begin = "memory ran out, and" if asked is None else f"micro_batch={asked}, and"
    if split == "off":
        raise error(
            "a batch does not fit into the memory, and the plan says that it must not be cut",
            fix='use a smaller batch, bf16 or activation checkpointing; or let it be cut: split="auto"',
        )
    if split == "items":
        return
    if any(accumulated_hooks(parameter) for parameter in parameters):
        raise error(
            f"{begin} parameters have hooks that run when their gradient is there, such as an optimizer that steps in"
            " the backward pass: in micro-batches they would run several times for one batch",
            fix='use a smaller batch, or step after the backward pass; where the hooks do no harm: split="items"',
        )
    if differs is not None:
        raise error(f"{begin} {differs}", fix=HOW_TO_SAY)


def joined(first: Any, second: Any, items: int, others: int) -> Any:
    """Two batches of so many items as one; None where they cannot be joined.

    >>> import torch
    >>> joined({"x": torch.zeros(2, 3)}, {"x": torch.ones(1, 3)}, 2, 1)["x"].shape
    torch.Size([3, 3])
    """
    rest = iter([tensor for _, tensor in tensors_in(second)])

    def both(tensor: Tensor) -> Tensor:
        other = next(rest)
        if tensor.dim() and other.dim() and (len(tensor), len(other)) == (items, others):
            return torch.cat([tensor, other])
        if torch.equal(tensor, other):  # such as a table, which every batch has
            return tensor
        raise ValueError

    try:
        return map_tensors(first, both)
    except (RuntimeError, ValueError, StopIteration):  # of other shapes, or other parts
        return None


def bounds(items: int, size: int) -> Iterator[tuple[int, int]]:
    """Where even micro-batches begin and end: their sizes differ by at most one."""
    count = -(-items // size)
    least, more = divmod(items, count)
    start = 0
    for number in range(count):
        stop = start + least + (number < more)
        yield start, stop
        start = stop


def count_items(batch: Any) -> int:
    """How many items a batch of any nesting holds: the first size that most of its tensors have in common.

    Where the tensors of each item lie in a list, as pictures of different sizes do, it is the length of the list.

    >>> import torch
    >>> count_items({"mask": torch.ones(5, 5), "x": torch.zeros(8, 5), "y": torch.zeros(8)})
    8
    >>> count_items(([torch.zeros(3, 20, 30), torch.zeros(3, 25, 25)], [{"boxes": torch.zeros(4, 4)}, {}]))
    2
    """
    if _lists_items(batch):
        return next(count for count in (_rows(part) for _, part in parts_of(batch)) if count is not None)
    sizes = Counter(tensor.size(0) for _, tensor in tensors_in(batch) if tensor.dim())
    if sizes:
        return sizes.most_common(1)[0][0]  # of equals the first
    words = batch if _is_words(batch) else next((part for _, part in parts_of(batch) if _is_words(part)), None)
    return 1 if words is None else len(words)


def _lists_items(batch: Any) -> bool:
    """Whether lists in a batch hold an item in each place, and not a field: pictures of several sizes, their boxes."""
    fields = [part for _, part in parts_of(batch) if _rows(part) is not None]
    lists = [field for field in fields if _is_list(field) and any(True for _ in tensors_in(field))]
    if not lists or len({_rows(field) for field in fields}) > 1:
        return False
    if any(isinstance(item, Mapping) for field in lists for item in field):
        return True
    return len({tensor.size(0) for _, tensor in tensors_in(batch) if tensor.dim()}) > 1


def _rows(field: Any) -> int | None:
    """How many items a part of a batch seems to hold; None where it says nothing about that."""
    if isinstance(field, Tensor):
        return field.size(0) if field.dim() else None
    return len(field) if _is_list(field) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not isinstance(value, PackedSequence)


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(word, str) for word in value)
