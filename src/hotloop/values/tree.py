"""The tree of a nested value, such as a batch: its parts, and the visitors of all of them.

Mappings (Hugging Face encodings too), lists, tuples, namedtuples, deques and dataclasses have parts; anything else is a
leaf. `is_leaf` says what else a visitor does not enter.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Set
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hotloop.values.kinds import CONTAINERS, NESTED, WORD_KINDS

MOST_ENTRIES = 100_000  # of a container whose parts are looked at one by one


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a value with their keys: positions, names of fields, keys of a mapping; none of a leaf."""
    if not NESTED[type(value)]:
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        names = getattr(value, "_fields", None)  # of a namedtuple
        return list(enumerate(value) if names is None else zip(names, value, strict=True))
    return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]


def path_to(path: str, value: object, key: Any) -> str:
    """The expression that reaches a part of a value, which `path` reaches."""
    is_field = isinstance(key, str) and not isinstance(value, Mapping)
    return f"{path}.{key}" if is_field else f"{path}[{key!r}]"


def tensors_in(value: object, path: str = "batch", seen: Set[int] = frozenset()) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested value with the expression that reaches it; with `set()`, no container is entered twice.

    >>> import torch
    >>> [name for name, _ in tensors_in({"x": torch.zeros(1), "pair": (torch.zeros(1), 2)})]
    ["batch['x']", "batch['pair'][0]"]
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, PackedSequence):
        yield f"{path}.data", value.data
    elif id(value) not in seen:  # else a container that holds itself
        seen |= {id(value)}  # a set notes all of them, a frozenset those around this one
        for key, part in parts_of(value):
            if type(part) not in WORD_KINDS:  # of which a vocabulary has many
                yield from tensors_in(part, path_to(path, value, key), seen)


def leaves(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a value, in their order.

    >>> leaves([1, {"a": (2, "b")}])
    [1, 2, 'b']
    """
    if not NESTED[type(value)] or (is_leaf is not None and is_leaf(value)):
        return [value]
    found: list[Any] = []
    for _, part in parts_of(value):
        if NESTED[type(part)]:
            found += leaves(part, is_leaf)
        else:
            found.append(part)
    return found


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among the leaves of a value."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def map_leaves(value: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The value with each leaf changed; the same object where none is.

    >>> map_leaves([1, {"a": (2, "b")}], lambda leaf: 2 * leaf)
    [2, {'a': (4, 'bb')}]
    """
    if not NESTED[type(value)] or (is_leaf is not None and is_leaf(value)):
        return change(value)
    return with_parts(value, lambda part: map_leaves(part, change, is_leaf))


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with each tensor changed.

    >>> import torch
    >>> map_tensors({"x": torch.ones(2), "name": "a"}, lambda tensor: tensor.sum().item())
    {'x': 2.0, 'name': 'a'}
    """
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with each part changed, of the same type; the same object where none is, or a leaf."""
    if not NESTED[type(value)]:
        return value
    if isinstance(value, list | tuple | deque):
        items = [change(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, deque):
            return type(value)(items, value.maxlen)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    before = dict(parts_of(value))
    after = {key: change(part) for key, part in before.items()}
    if all(after[key] is before[key] for key in before):
        return value
    is_mapping = isinstance(value, Mapping)
    if is_mapping and not isinstance(value, MutableMapping):
        return type(value)(after)  # an immutable mapping is built from a dict
    # A copy with parts replaced, not a call of the class: `__init__` may check or compute what must not run twice.
    clone = copy.copy(value)
    for key, part in after.items():
        if is_mapping:
            clone[key] = part
        else:
            object.__setattr__(clone, key, part)
    return clone


def form_of(value: Any, leaf: Callable[[Any], Hashable], is_leaf: Callable[[Any], bool] | None = None) -> Hashable:
    """What two values have in common where they are alike: kinds and keys, and what `leaf` says of each leaf.

    >>> form_of([1, {"a": 2.5}], type) == form_of([3, {"a": 4.5}], type) != form_of([3, {"b": 4.5}], type)
    True
    """
    if not NESTED[type(value)] or (is_leaf is not None and is_leaf(value)):
        return leaf(value)
    return (type(value), *[(key, form_of(part, leaf, is_leaf)) for key, part in parts_of(value)])


def changeable_in(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """What can be changed in place of a nested value: its containers, the outermost first, its tensors and arrays.

    Long containers are not entered, nor are those that hold words alone, such as a vocabulary.
    """
    if CONTAINERS[type(value)] or isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    seen = set() if seen is None else seen
    if not NESTED[type(value)] or id(value) in seen:
        return
    seen.add(id(value))
    parts = value.values() if isinstance(value, Mapping) else [part for _, part in parts_of(value)]
    if len(parts) <= MOST_ENTRIES and not WORD_KINDS.issuperset(map(type, parts)):
        for part in parts:
            yield from changeable_in(part, seen)


def held_by(container: Any) -> Any:
    """What a container holds."""
    if isinstance(container, bytearray):
        return bytes(container)
    return dict(container) if isinstance(container, MutableMapping) else list(container)


def refill(container: Any, before: Any) -> None:
    """Give a container back what it held."""
    if same_items(container, before):
        return
    if isinstance(container, list | bytearray):
        container[:] = before
        return
    for key in [key for key in container if isinstance(before, dict) and key not in before]:
        del container[key]
    if isinstance(before, dict):
        for key, value in before.items():
            container[key] = value
        return
    container.clear()
    add: Callable[[Any], object] = container.update if isinstance(container, set) else container.extend
    add(before)


def same_items(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(before, bytes):
        return bool(container == before)
    if isinstance(before, dict):
        if _are_one_by_one(container, before) and _are_one_by_one(container.values(), before.values()):
            return True
        return container.keys() == before.keys() and all(same_value(container[k], v) for k, v in before.items())
    return _are_one_by_one(container, before) or all(map(same_value, container, before))


def _are_one_by_one(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether both give the same objects in the same order: a quick question, also about a whole vocabulary."""
    return all(map(is_, some, others))


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are one, or plain and equal; never a question to a tensor."""
    return a is b or (type(a) is type(b) and type(a) in WORD_KINDS and bool(a == b))
