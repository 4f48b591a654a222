"""`DatasetState`: whether what makes the items of a loader is as it was. Where not all can be compared, it is not."""

import ctypes
import functools
import re
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from itertools import chain
from operator import attrgetter, is_, itemgetter
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotloop.values.effects import look, sum_of_words
from hotloop.values.rng import Generator

MOST_ENTRIES = 100_000  # entries that are compared in 15 ms; more would cost more than a start of workers
OBJECT, ARRAY = 20, 50  # entries in the time of which an object or an array is compared
MOST_ARRAY_BYTES = 256 << 20  # bytes of arrays, of which the sum takes 15 ms
_WORDS = (type(None), bool, int, float, complex, str, bytes)
_KINDS = frozenset(_WORDS)
_FIXED = (  # these do not change, or `look` sees all of them
    *(type, types.ModuleType, types.BuiltinFunctionType, range, slice, re.Pattern, PurePath, date, time, timedelta),
    *(itemgetter, attrgetter, np.generic, np.dtype, torch.dtype, torch.device, torch.Size, torch.layout),
    *(torch.memory_format, Generator),
)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class DatasetState:
    """What makes items (a dataset, a `collate_fn`, a `worker_init_fn`), at one moment.

    `look` sees what they reach, the globals and closures of their functions included, but only the ends of long lists
    and some places of large arrays. All that the objects hold is also compared in full: attributes and entries by
    identity, arrays by the sum of their words.
    """

    def __init__(self, makers: Mapping[str, object]) -> None:
        self._seen = look(makers)
        self._held = _Held(makers.values())

    @property
    def complete(self) -> bool:
        """Whether everything that was found could be compared."""
        return self._held.complete

    def same(self, later: "DatasetState") -> bool:
        """Whether nothing has changed, as far as both are compared."""
        same_caches = self._seen.caches == later._seen.caches  # an item that comes from one is not made anew
        return same_caches and self._held.same(later._held) and not self._seen.changes(later._seen)


class _Held:
    """What objects hold, in the order in which it is reached."""

    def __init__(self, roots: Iterable[object]) -> None:
        self.complete = True
        self._entries: list[list[Any]] = []  # held, so that no other object can take the place of one
        self._sums: list[tuple[Any, ...]] = []
        self._count = self._bytes = 0
        self._visited: dict[int, object] = {}
        self._kinds: set[type] = set()
        self._waiting = deque(roots)
        while self._waiting and self.complete:
            self._visit(self._waiting.popleft())
        self._visited, self._waiting = {}, deque()

    def same(self, later: "_Held") -> bool:
        if self.complete != later.complete or self._sums != later._sums:
            return False
        if [*map(len, self._entries)] != [*map(len, later._entries)]:
            return False
        return all(all(map(is_, a, b)) for a, b in zip(self._entries, later._entries, strict=True))

    def _visit(self, value: Any) -> None:
        if type(value) in _KINDS or id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if isinstance(value, Tensor | np.ndarray):
            self._array(value)
        elif isinstance(value, _CONTAINERS):
            self._container(value)
        elif isinstance(value, types.FunctionType):
            self._later([*_contents(value.__closure__), *(value.__defaults__ or ())])
        elif isinstance(value, types.MethodType):
            self._later([value.__self__, value.__func__])
        elif isinstance(value, functools.partial):
            self._later([value.func, *value.args, *value.keywords.values()])
        elif not isinstance(value, _FIXED):
            self._object(value)

    def _object(self, value: object) -> None:
        table = getattr(value, "__dict__", None)
        slots = [name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)]
        if table is None and not slots:
            self.complete = False  # an object of an extension, such as a table, which cannot be looked into
            return
        self._count += OBJECT
        self._keep([getattr(value, name) for name in slots])
        self._keep([each for name, each in (table or {}).items() if not name.startswith("__")])
        for kind in type(value).__mro__:
            if kind not in self._kinds:
                self._kinds.add(kind)
                of_kind = (each for name, each in vars(kind).items() if not name.startswith("__"))
                self._keep([each for each in of_kind if isinstance(each, (*_CONTAINERS, Tensor, np.ndarray))])

    def _container(self, value: Any) -> None:
        self._keep([*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value))

    def _keep(self, entries: list[Any]) -> None:
        self._count += len(entries)
        if self._count > MOST_ENTRIES:
            self.complete = False
            return
        self._entries.append(entries)
        if not (_are_words(entries) or (_are_tuples(entries) and _are_words(chain.from_iterable(entries)))):
            self._later(entries)

    def _later(self, values: Iterable[object]) -> None:
        self._waiting.extend(each for each in values if type(each) not in _KINDS)

    def _array(self, value: Any) -> None:
        self._count += ARRAY
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            self._keep(value.reshape(-1).tolist())
        elif value.nbytes and not _is_shared(value):
            memory = memory_of(value)
            if memory is None or self._bytes + memory.size > MOST_ARRAY_BYTES or self._count > MOST_ENTRIES:
                self.complete = False
                return
            self._bytes += memory.size
            # That the order of its words is the same is seen by `look`, in the places that it compares.
            self._sums.append((tuple(value.shape), str(value.dtype), sum_of_words(memory)))


def _are_words(values: Iterable[object]) -> bool:
    return set(map(type, values)) <= _KINDS


def _are_tuples(values: Iterable[object]) -> bool:
    """As in a list of (path, label), whose pairs cannot be changed; one by one they would take ten times as long."""
    return set(map(type, values)) == {tuple}


def _contents(cells: Iterable[types.CellType] | None) -> Iterator[Any]:
    for cell in cells or ():
        with suppress(ValueError):  # not bound yet
            yield cell.cell_contents


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in slots if not name.startswith("__"))


def _is_shared(value: Any) -> bool:
    """Whether workers see what is written to its memory."""
    if isinstance(value, np.memmap):
        return getattr(value, "mode", None) != "c"
    return isinstance(value, Tensor) and value.is_shared()


def memory_of(value: object, most: int | None = None) -> Any:
    """The bytes of a tensor or an array of the host, mostly without a copy; None for anything else.

    An array that is not of one piece is copied; with `most`, only so many rows of it as take about as many bytes.
    """
    if type(value) is np.ndarray or type(value) is np.memmap:
        if value.dtype.hasobject or not value.size:
            return None
        if not value.flags.forc:
            value = np.ascontiguousarray(value if most is None else value[:: max(1, value.nbytes // most)])
        return value.reshape(-1, order="A").view(np.uint8)
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer) or not isinstance(value, Tensor) or value.is_meta:
        return None
    if value.device.type != "cpu" or value.layout != torch.strided or not value.numel():
        return None
    steps = zip(value.shape, value.stride(), strict=True)
    extent = (1 + sum((size - 1) * stride for size, stride in steps)) * value.element_size()
    # By address: no operation of PyTorch, which a mode such as FakeTensorMode would take for one of the model.
    return np.frombuffer(memoryview((ctypes.c_uint8 * extent).from_address(value.data_ptr())), np.uint8)
