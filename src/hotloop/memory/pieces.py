"""A batch in pieces: everything in it that has a row for each item is cut, everything else goes with every piece."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hotloop.errors import BadArgument


def pieces_of(batch: Any, items: int, size: int) -> Iterator[Any]:
    """A batch of so many items in even pieces of at most `size`.

    >>> import torch
    >>> [len(piece["x"]) for piece in pieces_of({"x": torch.zeros(10, 2), "scale": 3.0}, items=10, size=4)]
    [4, 3, 3]
    """
    if size >= items:
        yield batch
        return
    for start, stop in bounds(items, size):
        yield _cut(batch, items, slice(start, stop))


def bounds(items: int, size: int) -> Iterator[tuple[int, int]]:
    """Where even pieces begin and end: their sizes differ by at most one."""
    count = -(-items // size)
    least, more = divmod(items, count)
    start = 0
    for number in range(count):
        stop = start + least + (number < more)
        yield start, stop
        start = stop


def _cut(value: Any, items: int, rows: slice) -> Any:
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and value.size(0) == items else value
    if isinstance(value, PackedSequence):
        raise BadArgument(
            "a batch that holds a packed sequence cannot be cut into pieces",
            fix="pack the sequences inside the model or the objective, or use a smaller batch",
        )
    if isinstance(value, Mapping):
        return _cut_mapping(value, items, rows)
    if isinstance(value, list | tuple):
        if len(value) == items and not any(_holds_rows(item, items) for item in value):
            return value[rows]  # a name, a path or a number for each item
        parts = [_cut(item, items, rows) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, _cut(getattr(value, field.name), items, rows))
        return changed
    return value


def _cut_mapping(value: Mapping[Any, Any], items: int, rows: slice) -> Any:
    parts = {key: _cut(item, items, rows) for key, item in value.items()}
    if type(value) is dict or not isinstance(value, MutableMapping):
        return parts
    changed = copy.copy(value)  # such as an encoding of Hugging Face, which a model takes with **
    if hasattr(changed, "data") and isinstance(changed.data, dict):
        changed.data = dict(changed.data)  # a copy of a UserDict shares its dict
    changed.update(parts)
    return changed


def _holds_rows(value: Any, items: int) -> bool:
    """Whether there is a tensor in it that has a row for each item."""
    if isinstance(value, Tensor):
        return bool(value.dim()) and value.size(0) == items
    if isinstance(value, Mapping):
        return any(_holds_rows(item, items) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_rows(item, items) for item in value)
    return False
