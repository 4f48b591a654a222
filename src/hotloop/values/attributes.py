"""Values that Python objects keep as attributes: which of them a checkpoint can hold, what has changed, how to restore.

Plain values are numbers, words, bytearrays, tensors and arrays, and lists, tuples, deques, dicts and sets of them.
"""

import hashlib
import re
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotloop._torch import version_of

HOOKS_INSTALLED = "_output_capturing_hooks_installed"  # of transformers, on a model whose layers it has hooked
LOST: Any = object()
MOST_ENTRIES = 100_000  # entries of a container that are looked at
ROOM = 64 << 20  # bytes of the tensors in a container
LITTLE = 1 << 20  # the same of a dataset, where more is data or a cache of it
_LARGE = 1 << 20  # bytes of a tensor or array from which on it is not kept alive for a comparison
_DEEPEST = 20
_WORDS = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_WORD_KINDS = set(_WORDS)
_KEYS = (bool, int, float, str, bytes, type(None))
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_NAME = re.compile(r"[\w .-]*")  # of a phase, a mode or a layer, which training changes
_NUMBERS = "biufcSUmM"  # kinds of NumPy values that are only bytes


class FlattenedValue:
    """A plain value, taken apart: its form with numbers for its tensors and arrays, and these."""

    def __init__(self, form: Any, leaves: list[Any]) -> None:
        self.form = form
        self.leaves = leaves

    def whole(self) -> Any:
        """The value again: other containers, the same tensors and arrays."""
        return _built(self.form, self.leaves)


def parts_of(value: object, room: int = ROOM) -> FlattenedValue | None:
    """A plain value taken apart; None for any other, and for one with too many entries or more than `room` bytes.

    >>> parts_of([1, (2.5, "a")]) is not None, parts_of([1, object()]) is not None
    (True, False)
    """
    if type(value) in _WORDS:
        return FlattenedValue(value, [])  # most attributes
    walk = _Flattener()
    try:
        form = walk.form(value, 0)
    except _NotPlain:
        return None
    if sum(leaf.nbytes for leaf in walk.leaves) > room and not (isinstance(value, Tensor) and room == ROOM):
        return None
    return FlattenedValue(form, walk.leaves)


class _NotPlain(Exception):
    pass


class _Leaf:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"leaf {self.number}"


class _Flattener:
    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self._entries = 0

    def form(self, value: Any, depth: int) -> Any:
        kind = type(value)
        self._entries += 1
        if self._entries + (len(value) if kind in _SEQUENCES else 0) > MOST_ENTRIES or depth > _DEEPEST:
            raise _NotPlain
        if kind in _WORDS or (isinstance(value, np.generic) and value.dtype.kind in _NUMBERS):
            return value
        if is_plain_tensor(value) or (kind is np.ndarray and value.dtype.kind in _NUMBERS):
            if depth and isinstance(value, Tensor) and value.requires_grad:
                raise _NotPlain  # a weight that no module has
            self.leaves.append(value)
            return _Leaf(len(self.leaves) - 1)
        if kind is bytearray:
            self.leaves.append(np.frombuffer(bytes(value), np.uint8))  # a copy: one that is viewed cannot grow
            return kind, _Leaf(len(self.leaves) - 1)
        if kind in _SEQUENCES:
            if set(map(type, value)) <= _WORD_KINDS:  # a hundred times as fast, for long lists of numbers
                self._entries += len(value)
                inner = tuple(value)
            else:
                inner = tuple(self.form(each, depth + 1) for each in list(value))
            return (kind, inner, value.maxlen) if kind is deque else (kind, inner)
        if kind in _SETS:
            return kind, tuple(sorted(map(_key, value), key=repr))
        if kind in _DICTS:
            return kind, tuple((_key(key), self.form(each, depth + 1)) for key, each in list(value.items()))
        raise _NotPlain


def _key(key: Any) -> Any:
    if type(key) is tuple:
        return tuple(map(_key, key))
    if type(key) not in _KEYS:
        raise _NotPlain
    return key


def is_plain_tensor(value: object) -> bool:
    """A tensor of values alone; one that remembers what it was computed from is a result that somebody looks at."""
    return (
        type(value) is Tensor
        and value.grad_fn is None
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_meta)
    )


class ValueSnapshot:
    """A plain value as it was, for a comparison that does not look at what is on a device."""

    def __init__(self, parts: FlattenedValue) -> None:
        self._form = parts.form
        self._text = _text(parts.form)
        self._leaves = [_LeafSnapshot(leaf) for leaf in parts.leaves]

    @property
    def value(self) -> Any:
        """What it was; `LOST` where that was changed in place, or was too large to be kept for this."""
        leaves = [mark.value for mark in self._leaves]
        return LOST if any(leaf is LOST for leaf in leaves) else _built(self._form, leaves)

    def fits(self, parts: FlattenedValue) -> bool:
        """Whether this is the same value still."""
        return (
            len(parts.leaves) == len(self._leaves)
            and _text(parts.form) == self._text
            and all(mark.fits(leaf) for mark, leaf in zip(self._leaves, parts.leaves, strict=True))
        )


class _LeafSnapshot:
    """A tensor or an array."""

    def __init__(self, leaf: Any) -> None:
        is_large = leaf.nbytes > _LARGE
        self._version = _version(leaf)
        self._digest = _digest(leaf) if isinstance(leaf, np.ndarray) else None
        self._leaf: Callable[[], Any]
        if isinstance(leaf, np.ndarray):
            self._leaf = partial(_same, LOST if is_large else leaf.copy())
        else:
            self._leaf = weakref.ref(leaf) if is_large else partial(_same, leaf)

    @property
    def value(self) -> Any:
        leaf = self._leaf()
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        return leaf if isinstance(leaf, Tensor) and self._version == _version(leaf) is not None else LOST

    def fits(self, leaf: Any) -> bool:
        if isinstance(leaf, np.ndarray):
            return self._digest == _digest(leaf)
        return self.value is leaf


def devices_of(value: object) -> list[str]:
    """The kinds of device that the tensors in a plain value are on."""
    parts = parts_of(value)
    return [] if parts is None else [leaf.device.type for leaf in parts.leaves if isinstance(leaf, Tensor)]


def moved(value: Any, devices: Iterator[torch.device]) -> Any:
    """A plain value from a checkpoint with each of its tensors on a device, in their order."""
    parts = parts_of(value, room=1 << 62)
    if parts is None:
        return value
    leaves = [leaf.to(next(devices)) if isinstance(leaf, Tensor) else leaf for leaf in parts.leaves]
    return _built(parts.form, leaves)


def may_become(owner: object, name: str, value: object) -> bool:
    """Whether an attribute may be given this value, which comes from a file that anyone may have written.

    Numbers, tensors and containers take each other's place among their kind, and the place of None. A string must be a
    name: no path, address or code, which are settings. A new attribute hides nothing, and holds no strings.
    """
    if name not in vars(owner):
        return not (hasattr(owner, name) or name.startswith("__") or any(True for _ in _words_in(value)))
    if not all(isinstance(word, str) and _NAME.fullmatch(word) for word in _words_in(value)):
        return False
    now, kinds = vars(owner)[name], {_family(vars(owner)[name]), _family(value)}
    return len(kinds) == 1 or now is None or value is None or kinds <= {float, Tensor, np.ndarray}


def _family(value: object) -> type:
    """The kind of a value, where those that take each other's place are one: all numbers, all sequences."""
    families: dict[type, tuple[type, ...]] = {
        float: (int, float, complex, np.number, np.bool_),
        list: _SEQUENCES,
        set: _SETS,
        dict: (dict,),
        Tensor: (Tensor,),
    }
    return next((name for name, kinds in families.items() if isinstance(value, kinds)), type(value))


def _words_in(value: object) -> Iterator[str | bytes]:
    """The strings and bytes in a plain value."""
    if isinstance(value, str | bytes):
        yield value
    elif isinstance(value, (dict, *_SEQUENCES, *_SETS)):
        for each in chain(value, value.values() if isinstance(value, dict) else ()):
            yield from _words_in(each)


class Restoring:
    """Gives attributes the values that they had, in place where they can be changed: other references stay valid."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, str]] = {}  # containers that were restored: themselves, and to what

    def put(self, table: dict[str, Any], name: str, value: Any) -> None:
        now = table.get(name)
        parts = parts_of(value, room=1 << 62)
        text = "" if parts is None else f"{_text(parts.form)} {list(map(id, parts.leaves))}"
        if id(now) in self._done and self._done[id(now)][1] != text:
            now = None  # two names had one container when the script began, and have two by now
        if not _in_place(now, value):
            if isinstance(now, Tensor) and isinstance(value, Tensor) and now.requires_grad:
                value.requires_grad_()
            table[name] = value
            return
        self._done[id(now)] = (now, text)


def _in_place(now: Any, value: Any) -> bool:
    """Fill a container with the entries of another; whether that was possible."""
    if any(isinstance(now, kind) and isinstance(value, kind) for kind in (list, bytearray)):
        now[:] = value
    elif isinstance(now, deque) and isinstance(value, deque | list):
        now.clear()
        now.extend(value)
    elif (isinstance(now, set) and isinstance(value, set)) or (
        isinstance(now, MutableMapping) and isinstance(value, dict)
    ):
        now.clear()
        now.update(value)
    elif isinstance(now, np.ndarray) and isinstance(value, np.ndarray):
        if now.shape != value.shape or now.dtype != value.dtype or not now.flags.writeable:
            return False
        now[...] = value
    else:
        return False
    return True


def _built(form: Any, leaves: list[Any]) -> Any:
    if isinstance(form, _Leaf):
        return leaves[form.number]
    if type(form) is not tuple:
        return form
    kind, inner, *more = form
    if kind is bytearray:
        return bytearray(leaves[inner.number])
    if kind in _SETS:
        return kind(inner)
    if kind in _DICTS:
        made = {key: _built(each, leaves) for key, each in inner}
        return made if kind in (dict, defaultdict) else kind(made)
    return kind((_built(each, leaves) for each in inner), *more)


def _text(form: Any) -> str:
    return f"{type(form).__name__} {form!r}"  # nan is itself, and 1 is not True


def _same(value: Any) -> Any:
    return value


def _version(value: Any) -> int | None:
    """How often a tensor was changed in place, where that is known."""
    return version_of(value) if isinstance(value, Tensor) else None


def _digest(array: Any) -> str:
    data = np.ascontiguousarray(array)
    return f"{array.shape} {array.dtype} {hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()}"
