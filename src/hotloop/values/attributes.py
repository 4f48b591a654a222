"""Values that objects keep as attributes: which of them a checkpoint can hold, what has changed, how to restore."""

import hashlib
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotloop._torch import version_of
from hotloop.checkpoint.codec import JsonToTree, TreeToJson
from hotloop.values.kinds import NUMBERS, ROOM, SEQUENCES, SETS, is_plain_tensor
from hotloop.values.tree import MOST_ENTRIES, held_by, refill

HOOKS_INSTALLED = "_output_capturing_hooks_installed"  # of transformers, on a model whose layers it has hooked
LOST: Any = object()
LITTLE = 1 << 20  # bytes of the tensors in an attribute of a dataset, where more is data or a cache of it
_LARGE = 1 << 20  # bytes of a tensor or array from which on it is not kept alive for a comparison
_NUMBER = (*NUMBERS, np.number, np.bool_)
_FAMILIES: tuple[Any, ...] = (_NUMBER, SEQUENCES, SETS, dict, Tensor)
_NAME = re.compile(r"[\w .-]*")  # of a phase, a mode or a layer, which training changes


class _NotPlain(Exception):
    pass


class PlainValue(TreeToJson):
    """A plain value taken apart as for a checkpoint: its form, with numbers for its tensors and arrays, and these."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.leaves: list[Any] = []
        self._entries = 0
        self.form = self.value(value)

    def whole(self) -> Any:
        """The value again: other containers, the same tensors and arrays."""
        return _whole(self.form, self.leaves)

    def tensor(self, tensor: Tensor) -> Any:
        if not is_plain_tensor(tensor) or (self.place and tensor.requires_grad):  # a weight that no module has
            raise self.error("a result, or a weight")
        return {"$leaf": self._keep(tensor)}

    def array(self, value: Any) -> Any:
        return {"$leaf": self._keep(value)}

    def store(self, tensor: Tensor) -> int:
        return self._keep(tensor.numpy())  # the bytes of a bytearray

    def items(self, items: Any) -> list[Any]:
        self._count(items)
        return super().items(items)

    def mapping(self, given: dict[Any, Any]) -> Any:
        self._count(given)
        return super().mapping(given)

    def error(self, what: str) -> Exception:
        return _NotPlain(what)

    def _keep(self, leaf: Any) -> int:
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def _count(self, entries: Any) -> None:
        self._entries += len(entries)
        if self._entries > MOST_ENTRIES:
            raise self.error("too long")


class _Whole(JsonToTree):
    def __init__(self, leaves: list[Any]) -> None:
        self._leaves = leaves

    def tagged(self, tag: str, held: Any, data: dict[str, Any]) -> Any:
        return self._leaves[held] if tag == "$leaf" else super().tagged(tag, held, data)

    def stored(self, name: Any) -> Any:
        return self._leaves[name]


def _whole(form: Any, leaves: list[Any]) -> Any:
    return _Whole(leaves).value(form)


def plain(value: object, room: int = ROOM) -> PlainValue | None:
    """A plain value, taken apart; None for any other, and for one with too many entries or more than `room` bytes.

    >>> plain([1, (2.5, "a")]) is not None, plain([1, object()]) is not None
    (True, False)
    """
    try:
        found = PlainValue(value)
    except _NotPlain:
        return None
    is_small = sum(leaf.nbytes for leaf in found.leaves) <= room or (isinstance(value, Tensor) and room == ROOM)
    return found if is_small else None


class ValueSnapshot:
    """A plain value as it was, for a comparison that does not look at what is on a device."""

    def __init__(self, value: PlainValue) -> None:
        self._form, self._text = value.form, repr(value.form)  # as text, 1 is not True
        self._leaves = [_LeafSnapshot(leaf) for leaf in value.leaves]

    @property
    def value(self) -> Any:
        """What it was; `LOST` where that was changed in place, or was too large to be kept for this."""
        leaves = [mark.value for mark in self._leaves]
        return LOST if any(leaf is LOST for leaf in leaves) else _whole(self._form, leaves)

    def fits(self, value: PlainValue) -> bool:
        """Whether this is the same value still."""
        return (
            len(value.leaves) == len(self._leaves)
            and repr(value.form) == self._text
            and all(mark.fits(leaf) for mark, leaf in zip(self._leaves, value.leaves, strict=True))
        )


class _LeafSnapshot:
    """A tensor, known by how often it was written, or an array, known by a digest."""

    def __init__(self, leaf: Any) -> None:
        is_large = leaf.nbytes > _LARGE
        self._leaf: Callable[[], Any]
        if isinstance(leaf, Tensor):
            self._mark: object = version_of(leaf)
            self._leaf = weakref.ref(leaf) if is_large else lambda: leaf
        else:
            copy = LOST if is_large else leaf.copy()
            self._mark, self._leaf = _digest(leaf), lambda: copy

    @property
    def value(self) -> Any:
        leaf = self._leaf()
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        return leaf if isinstance(leaf, Tensor) and self._mark == version_of(leaf) is not None else LOST

    def fits(self, leaf: Any) -> bool:
        return self._mark == _digest(leaf) if isinstance(leaf, np.ndarray) else self.value is leaf


def devices_of(value: object) -> list[str]:
    """The kinds of device that the tensors in a plain value are on."""
    found = plain(value)
    return [] if found is None else [leaf.device.type for leaf in found.leaves if isinstance(leaf, Tensor)]


def moved(value: Any, devices: Iterable[torch.device]) -> Any:
    """A plain value from a checkpoint with each of its tensors on a device, in their order."""
    found = plain(value, room=1 << 62)
    if found is None:
        return value
    on = iter(devices)
    leaves = [leaf.to(next(on, leaf.device)) if isinstance(leaf, Tensor) else leaf for leaf in found.leaves]
    return _whole(found.form, leaves)


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
    return len(kinds) == 1 or now is None or value is None or kinds <= {_NUMBER, Tensor, np.ndarray}


def _family(value: object) -> object:
    """The kind of a value, where those that take each other's place are one: all numbers, all sequences."""
    return next((kinds for kinds in _FAMILIES if isinstance(value, kinds)), type(value))


def _words_in(value: object) -> Iterator[str | bytes]:
    """The strings and bytes in a plain value."""
    if isinstance(value, str | bytes):
        yield value
    elif isinstance(value, (dict, *SEQUENCES, *SETS)):
        for each in chain(value, value.values() if isinstance(value, dict) else ()):
            yield from _words_in(each)


class Restoring:
    """Gives attributes the values that they had, in place where they can be changed: other references stay valid."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, str]] = {}  # containers that were restored: themselves, and to what

    def put(self, table: dict[str, Any], name: str, value: Any) -> None:
        now = table.get(name)
        found = plain(value, room=1 << 62)
        text = "" if found is None else f"{found.form} {list(map(id, found.leaves))}"
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
    if isinstance(now, np.ndarray) and isinstance(value, np.ndarray):
        if now.shape != value.shape or now.dtype != value.dtype or not now.flags.writeable:
            return False
        now[...] = value
        return True
    kinds = {list: list, bytearray: bytearray, deque: deque | list, set: set, MutableMapping: dict}
    is_alike = any(isinstance(now, kind) and isinstance(value, others) for kind, others in kinds.items())
    if is_alike:
        held = held_by(value)
        now.clear()  # the entries of a dict get their order too
        refill(now, held)
    return is_alike


def _digest(array: Any) -> str:
    data = np.ascontiguousarray(array)
    return f"{array.shape} {array.dtype} {hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()}"
