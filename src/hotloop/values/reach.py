"""`look`: the Python state that a training step can reach; two looks tell what a step has changed, by name.

A step may change more than weights, buffers and rng states: a counter in a closure, a queue in a module, a teacher that
an optimizer's hook updates. What is seen to change here cannot be restored, is left out of a CUDA graph's replays, and
is not in a checkpoint unless somebody saves it.
"""

import ctypes
import functools
import inspect
import io
import itertools
import logging
import os
import random
import re
import sys
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date, time, timedelta
from mmap import mmap
from numbers import Number
from operator import attrgetter, itemgetter, length_hint
from pathlib import PurePath
from queue import SimpleQueue
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import (
    BUFFERS,
    ENGINES,
    FORWARD_HOOKS,
    MODULES,
    OF_STATE_DICT,
    PARAMETERS,
    REGISTERED,
    SCHEDULER_NOTES,
    BatchNorm,
    version_of,
)
from hotloop.placement.sites import is_users_file
from hotloop.values.attributes import HOOKS_INSTALLED
from hotloop.values.code import digest_of, names_in
from hotloop.values.kinds import WORD_TYPES, Kinds, has_values, is_restored
from hotloop.values.rng import Generator, Rng, with_arrays
from hotloop.values.tree import leaves

MOST_OBJECTS = 50_000  # objects that are looked at
EDGE = 64  # entries at each end of a long list that are looked at
DEEPEST = 12  # levels below a root
LONG_LIST = 1 << 16  # entries of a list up to which all numbers and words in it are looked at
LARGE = 1 << 16  # bytes of an array from which on some of it stands for all
WHOLE = 1 << 26  # bytes of an array up to which a sum stands for the rest
MOST_COMPARED = 100_000  # that a full look compares, in 15 to 80 ms: more would cost more than a start of workers
OBJECT = 50  # entries in the time of which an object or an array is compared
MOST_ARRAY_BYTES = 256 << 20  # bytes of arrays, of which the sum takes 15 ms
_PARTS = re.compile(r"[.\[<]")  # where in a path that of a part begins
_WORDS = (*WORD_TYPES, torch.memory_format, type(...))
_KINDS = frozenset(_WORDS)
_NUMBERS = (Number, np.number, np.bool_)
_VALUES = (Number, np.generic, date, timedelta)  # kinds of values that nothing changes in place
_MEMORY = (bytearray, memoryview, array, mmap, ctypes.c_int.__mro__[-2])  # bytes that are changed in place
_QUEUES = (io.IOBase, SimpleQueue)
# What a person's code may change of modules of libraries.
_OF_LIBRARIES = frozenset((*_WORDS, list, set, deque, dict, type(os.environ)))
_TABLES = (dict, OrderedDict)
_MAPPINGS = (dict, types.MappingProxyType, type(os.environ))  # others keep what they hold in attributes
_CACHE = type(functools.cache(len))
_FIXED = (  # kinds of objects that do not change, or of which a look sees all
    *(type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, _CACHE),
    *(range, slice, re.Pattern, PurePath, time, itemgetter, attrgetter, np.dtype, torch.layout),
)
_CLOSED = (  # nothing in these is a person's state
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.FrameType,
    types.CodeType,
    weakref.ref,
    torch.UntypedStorage,
    torch.Size,
    logging.Logger,
    logging.Handler,
)
_CORE = "hotloop.run.core"  # what a loop keeps itself, where the objective is a method of an object that has one
# What a look does with objects of a type; asked for thousands of them in each.
_IS_WORD = Kinds(lambda kind: kind in _WORDS or issubclass(kind, _VALUES))
_IS_NUMBER = Kinds(lambda kind: issubclass(kind, _NUMBERS))
_HAS_MARK = Kinds(lambda kind: issubclass(kind, (Tensor, np.ndarray, *_MEMORY, *_QUEUES, *get_args(Generator))))
_IS_ENGINE = Kinds(lambda kind: str(kind.__module__).startswith(ENGINES) and not issubclass(kind, nn.Module))
_IS_OPEN = Kinds(  # whether there may be a person's state in it
    lambda kind: not (_IS_ENGINE[kind] or issubclass(kind, _CLOSED) or kind.__module__ == _CORE)
)
_IS_MAPPING = Kinds(lambda kind: issubclass(kind, _MAPPINGS) or (issubclass(kind, Mapping) and not kind.__dictoffset__))
# Global generators, whose states everybody restores, and what changes whenever something is imported.
_LOOKED_AFTER: tuple[Any, ...] = (
    *(random.random.__self__, np.random.random.__self__, torch.default_generator),  # type: ignore[attr-defined]
    sys.modules,
)
_CAPTURING = "transformers.utils.output_capturing"
# What PyTorch itself keeps in an optimizer besides its state, and changes as it likes.
_OF_OPTIMIZERS = SCHEDULER_NOTES | {"state", "param_groups", "defaults", "grad_scale", "found_inf", "step"}

Skip = Callable[[object, str, object], bool]  # (owner, attribute, value): whether somebody else looks after it


class Place(NamedTuple):
    """Where a value was seen, to read it again: an entry of a dict or a list, an attribute, or a cell."""

    table: Any
    key: Any  # None of a cell
    value: Any
    path: str

    @property
    def has_number(self) -> bool:
        return _IS_NUMBER[type(self.value)]

    def read(self) -> Any:
        table, key = self.table, self.key
        try:
            if key is None:
                return table.cell_contents
            return table[key] if isinstance(table, dict | list) else getattr(table, key)
        except (KeyError, IndexError, AttributeError, ValueError, TypeError):
            return _GONE


class ReachableState:
    """What was seen: every number, word, tensor and rng state, by the path on which it was reached."""

    def __init__(self) -> None:
        self.values: dict[str, Hashable] = {}
        self.tensors: dict[str, Tensor] = {}  # only of a look that holds them
        self.places: list[Place] = []  # of numbers; of a look that holds tensors, also of these and what may hold them
        self.number_holders: list[Place] = []  # of objects that hold numbers alone
        self.codes: set[types.CodeType] = set()  # of the person's own functions on the way
        self.generators: dict[str, Generator] = {}  # of random numbers, by path
        self.caches: dict[str, int] = {}  # of `functools`, and how many results each has computed
        self.complete = True  # whether everything was looked at

    def changes(self, later: "ReachableState", *, tensors: bool = True) -> list[str]:
        """Names of what differs in a later look; without `tensors`, the values of tensors may differ."""
        mine, theirs = (_comparable(each.values, tensors) for each in (self, later))
        pairs = ((path, mine.get(path, _GONE), theirs.get(path, _GONE)) for path in mine.keys() | theirs.keys())
        return sorted({shown(path) for path, then, now in pairs if then is not now and then != now})

    def moved(self, *, strictly: bool = False) -> list[tuple[str, Any, Any]]:
        """Numbers that differ now from what was seen, and tensors that were replaced: (name, then, now).

        So is a tensor in an object that was; `strictly`: a number in one, too. Cheap: nothing is searched again.
        """
        found: list[tuple[str, Any, Any]] = []
        for place in (*self.places, *(self.number_holders if strictly else ())):
            then, now = place.value, place.read()
            if now is then:
                continue
            if not place.has_number:
                found.append((shown(place.path), "a tensor", "another"))
            elif type(now) is not type(then) or repr(now) != repr(then):  # as words, nan is itself
                found.append((shown(place.path), then, now))
        return found

    def hold_only(self, wanted: Callable[[Tensor], bool]) -> None:
        """Keep only the wanted tensors, and what holds them or numbers; they are noticed when they are replaced."""
        above = _above(path for path, tensor in self.tensors.items() if wanted(tensor))
        above_numbers = _above(place.path for place in self.places if place.has_number) - above
        self.number_holders = [place for place in self.places if place.path in above_numbers]
        self.places = [
            place
            for place in self.places
            if place.has_number or (wanted(place.value) if isinstance(place.value, Tensor) else place.path in above)
        ]
        self.tensors.clear()

    def code(self) -> str:
        """A digest of the person's functions that were reached, and of those that these name."""
        return digest_of(self.codes)


def look(
    roots: Mapping[str, object],
    skip: Skip | None = None,
    known: Iterable[object] = (),
    *,
    hold: bool = False,
    fully: bool = False,
) -> ReachableState:
    """Look at everything that is reachable from `roots`, by their names, but for what is `known`.

    `hold`: the look has the tensors that it saw, and keeps them alive. `fully`: of long lists and large arrays all is
    compared, not some places; what cannot be compared, or not in the time of starting a few processes, makes the look
    incomplete.

    >>> calls = [1, 2]
    >>> before = look({"objective": calls.append})
    >>> calls.append(3)
    >>> before.changes(look({"objective": calls.append}))
    ['objective']
    """
    walk = (_FullWalk if fully else _Walk)(skip or (lambda owner, name, value: False), hold=hold)
    walk.leave(known)
    walk.leave((*_LOOKED_AFTER, *torch.cuda.default_generators))
    for name, root in roots.items():
        walk.visit(root, name, 0)
    walk.finish()
    return walk.seen


def watched_changes(
    roots: Mapping[str, object], skip: Skip | None = None, known: Iterable[object] = ()
) -> Callable[[], list[str]]:
    """Look now; the function that is returned looks again, and names what has changed since.

    >>> calls = []
    >>> changes = watched_changes({"objective": calls.append})
    >>> calls.append(1)
    >>> changes()
    ['objective']
    """
    known = list(known)
    before = look(roots, skip, known)
    return lambda: before.changes(look(roots, skip, known))


class CallEffects:
    """What each call of the person's code changes that a `PassSnapshot` does not restore, by name.

    Calls are looked at until one changes nothing, or two have changed something: what the first alone changes may be
    done once, as by one that fills a cache. `tell` is given the names if one of these calls was no step's.

    >>> calls = []
    >>> effects = CallEffects(print, lambda: {"objective": calls.append})
    >>> for number in range(2):
    ...     with effects.looked_at([]):
    ...         calls.append(number)
    >>> effects.names
    ['objective']
    """

    def __init__(
        self, tell: Callable[[list[str]], None], roots: Callable[[], Mapping[str, object]] | None = None
    ) -> None:
        self.roots = roots  # from where the code is reached; None: not looked at
        self.names: list[str] | None = None  # None: not known yet
        self._first: list[str] = []
        self._was_extra = False
        self._tell = tell

    @property
    def are_known(self) -> bool:
        return self.roots is None or self.names is not None

    @contextmanager
    def looked_at(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Look at a call of a step."""
        may_repeat = self.before_call(modules)
        try:
            yield
        finally:
            may_repeat()

    def before_call(self, modules: Sequence[nn.Module], *, is_extra: bool = False) -> Callable[[], bool]:
        """Look; the function that is returned looks after the call, and says whether another one would do no harm."""
        if self.roots is None or self.names is not None:
            return lambda: not self.names
        self._was_extra |= is_extra
        weights = [parameter for module in modules for parameter in module.parameters()]
        changes = watched_changes(self.roots(), restored_by_pass(modules), weights)

        def may_repeat() -> bool:
            if self.names is None:
                changed = changes()
                if changed and not self._first:
                    self._first = changed
                    return False
                self.names = changed
                if changed and self._was_extra:
                    self._tell(changed)
            return not self.names

        return may_repeat


def installed_once(name: str, value: object) -> bool:
    """Whether a module holds this since transformers hooks its layers when it is first asked for their outputs.

    The hooks stay, and so does the mark that they are there: without it each call that was undone would add others.
    """
    if name == FORWARD_HOOKS and isinstance(value, Mapping):
        return all(getattr(hook, "__module__", None) == _CAPTURING for hook in value.values())
    return name == HOOKS_INSTALLED


def restored_by_state(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> Skip:
    """For trials: what a `Snapshot` restores of these modules and optimizers."""
    known = {id(inner) for module in modules for inner in module.modules()} | set(map(id, optimizers))

    def skip(owner: object, name: str, value: object) -> bool:
        if isinstance(owner, Optimizer):
            return name in _OF_OPTIMIZERS and (name != "state" or id(owner) in known)
        if id(owner) not in known:
            return False
        return name in (PARAMETERS, BUFFERS) or isinstance(value, (*WORD_TYPES, Tensor)) or installed_once(name, value)

    return skip


def restored_by_pass(modules: Iterable[nn.Module]) -> Skip:
    """For further calls: what a `PassSnapshot` restores of modules, and what no call changes of optimizers."""
    known = {id(inner) for module in modules for inner in module.modules()}

    def skip(owner: object, name: str, value: object) -> bool:
        if isinstance(owner, Optimizer):
            return name != "param_groups"  # no call of an objective steps it, but one may change its rates
        inner = id(owner) in known and name != MODULES
        return inner and (
            name in (PARAMETERS, BUFFERS)
            or is_restored(value)
            or isinstance(value, Tensor | Generator)
            or installed_once(name, value)
        )

    return skip


def counted_per_call(owner: object, name: str, value: object) -> bool:
    """For repetitions in micro-batches: what does not depend on how often the person's code is called."""
    if isinstance(owner, Optimizer):
        return True  # it steps once
    of_norm = isinstance(owner, BatchNorm) and name == BUFFERS  # which is told elsewhere
    return of_norm or name in (PARAMETERS, "training")


def kept_by_capture(owner: object, name: str, value: object) -> bool:
    """For captures: weights and modes, which are compared in another way."""
    return name == "training" or (isinstance(owner, nn.Module) and name == PARAMETERS)


def shown(path: str) -> str:
    """The name of what a path leads to: the variable, and the attribute that holds it.

    >>> shown("objective<teacher>.queue[3]"), shown("model.queue[0].step")
    ('teacher.queue', 'model.queue')
    """
    path = path.rpartition("<")[2].replace(">", "")
    return path.partition("[")[0] or path


def _above(paths: Iterable[str]) -> set[str]:
    """The paths of all that holds what lies at these."""
    return {path[: found.start()] for path in paths for found in _PARTS.finditer(path)}


_GONE = object()


class _Tensor(tuple[Any, ...]):
    """The fingerprint of a tensor: its form first, then what its values are known by."""

    __slots__ = ()

    @property
    def form(self) -> Hashable:
        return ("tensor", *self[:2])


def _comparable(values: dict[str, Hashable], tensors: bool) -> dict[str, Hashable]:
    if tensors:
        return values
    return {path: value.form if isinstance(value, _Tensor) else value for path, value in values.items()}


class _Walk:
    def __init__(self, skip: Skip, *, hold: bool) -> None:
        self.seen = ReachableState()
        self._skip, self._hold = skip, hold
        self._classes_seen: set[tuple[type, frozenset[str]]] = set()
        self._visited: dict[int, object] = {}  # held, so that no other takes the place
        self._later: deque[tuple[object, str, int]] = deque()

    def _has_slots(self, kind: type) -> bool:
        """Whether slots of a class may hold a person's state."""
        return _is_own_class(kind)

    def leave(self, known: Iterable[object]) -> None:
        """Look neither at these nor below them."""
        self._visited.update((id(value), value) for value in known)

    def visit(self, value: Any, path: str, depth: int) -> None:
        """A root, or a part of what was visited: leaves are noted, the rest waits for its turn."""
        kind: type = type(value)
        if _IS_WORD[kind]:
            self.seen.values[path] = value if kind is not str or len(value) < 256 else hash(value)
            return
        if kind in _TABLES and not value:  # of which something is seen once it holds something
            return
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if len(self._visited) > MOST_OBJECTS or depth > DEEPEST:
            self.seen.complete = False
            return
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            self.visit(value.reshape(-1).tolist(), path, depth)
        elif _HAS_MARK[kind]:
            self.seen.values[path] = _mark(value)
            if isinstance(value, Generator):
                self.seen.generators[path] = value
            elif self._hold and isinstance(value, Tensor):
                self.seen.tensors[path] = value
        elif kind is tuple and _is_plain(value):
            self.seen.values[path] = value
        elif kind is types.BuiltinFunctionType and not isinstance(value.__self__, types.ModuleType | None):
            self.visit(value.__self__, path, depth)  # such as `log.append`
        elif kind is ContextVar:
            self.visit(value.get(None), path, depth)
        elif _IS_OPEN[kind] or (not _IS_ENGINE[kind] and _is_own_class(value)):
            self._later.append((value, path, depth + 1))

    def finish(self) -> None:
        """Breadth first, so that what lies near a root has the short name."""
        while self._later:
            try:
                self._inside(*self._later.popleft())
            except Exception:  # noqa: BLE001  # of a library's object, which may fail in any way
                self.seen.complete = False

    def _inside(self, value: Any, path: str, depth: int) -> None:
        if _IS_MAPPING[type(value)]:
            self._mapping(value, path, depth)
        if isinstance(value, list | tuple | deque):
            self._sequence(value, path, depth)
        elif isinstance(value, set | frozenset):
            is_plain = set(map(type, value)).issubset(_WORDS)  # then it is hashed without a call for each of its words
            self.seen.values[path] = (len(value), hash(frozenset(value if is_plain else filter(_is_plain, value))))
        elif isinstance(value, types.FunctionType):
            self._function(value, path, depth)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, path, depth)
            self.visit(value.__func__, path, depth)
        elif isinstance(value, functools.partial):
            self.visit(value.func, path, depth)
            self.visit(value.args, f"{path}.args", depth)
            for name, part in value.keywords.items():
                self.visit(part, f"{path}<{name}>", depth)
        elif isinstance(value, _CACHE):
            self.seen.caches[path] = value.cache_info().misses
        elif isinstance(value, type):
            self._class(value, path, depth)
        elif isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            self._iterator(value, path, depth)
        has_attributes = isinstance(getattr(value, "__dict__", None), dict) or self._has_slots(type(value))
        if has_attributes and not isinstance(value, type) and value is not os.environ:  # of which the entries are all
            self._object(value, path, depth)

    def _iterator(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, types.GeneratorType):
            self.seen.values[path] = None if value.gi_frame is None else value.gi_frame.f_lasti
            for name, part in inspect.getgeneratorlocals(value).items():
                self.visit(part, f"{path}[{name}]", depth)
        elif isinstance(value, itertools.count):
            self.seen.values[path] = repr(value)
        else:
            left = length_hint(value, -1)
            self.seen.values[path] = left if left >= 0 else _Unseen()

    def _object(self, value: Any, path: str, depth: int) -> None:
        self._table(value, getattr(value, "__dict__", {}), path, depth)
        kinds = filter(self._has_slots, type(value).__mro__)
        slots = (name for kind in kinds for name in _slots_of(kind) if hasattr(value, name))
        self._table(value, {name: getattr(value, name) for name in slots}, path, depth)
        for kind in filter(_is_own_class, type(value).__mro__):
            self._class(kind, path, depth, frozenset(vars(kind).keys() & getattr(value, "__dict__", {}).keys()))

    def _class(self, kind: type, path: str, depth: int, hidden: frozenset[str] = frozenset()) -> None:
        """What a person's class holds itself; `hidden` are attributes that an object of it has for itself."""
        if (kind, hidden) in self._classes_seen:
            return
        self._classes_seen.add((kind, hidden))
        self._note_places(kind, {k: v for k, v in vars(kind).items() if isinstance(v, _WORDS)}, path)
        for name, part in list(vars(kind).items()):
            code = part.__func__ if isinstance(part, classmethod | staticmethod) else part
            if isinstance(code := code.fget if isinstance(code, property) else code, types.FunctionType):
                self._function(code, f"{path}.{name}", depth)
            elif isinstance(part, _CACHE):
                self.visit(part, f"{path}.{name}", depth)
            elif name in hidden:
                continue  # as of a dataclass with a default
            elif not name.startswith("__") and not callable(part) and not hasattr(part, "__get__"):
                self.visit(part, f"{path}.{name}", depth)

    def _table(self, owner: object, table: Mapping[str, Any], path: str, depth: int) -> None:
        kept = {}
        for name, part in list(table.items()):
            if type(part) in _TABLES and not part:  # a module has a dozen of them
                continue
            if name in OF_STATE_DICT or self._skip(owner, name, part) or (name == "forward" and is_ours(part)):
                self._visited[id(part)] = part
                if isinstance(part, dict):
                    self._visited.update((id(inner), inner) for inner in part.values() if isinstance(inner, Tensor))
            else:
                kept[name] = part
        is_own = table is getattr(owner, "__dict__", None)
        self._note_places(table if is_own and isinstance(table, dict) else owner, kept, path)
        for name, part in kept.items():
            inner = path if name in REGISTERED else f"{path}.{name}"
            self.visit(part, inner, depth)

    def _note_places(self, table: object, values: Mapping[str, Any], path: str) -> None:
        for name, part in values.items():
            if not name.startswith("__"):
                self._note_place(table, name, part, f"{path}.{name}")

    def _note_place(self, table: object, key: Any, part: Any, path: str) -> None:
        kind: type = type(part)
        if _IS_NUMBER[kind] or (self._hold and not _IS_WORD[kind]):
            self.seen.places.append(Place(table, key, part, path))

    def _mapping(self, value: Any, path: str, depth: int) -> None:
        kind: Any = dict if isinstance(value, dict) else type(value)  # a library may load what its own methods give
        keys, parts = kind.keys(value), kind.values(value)
        kinds = set(map(type, parts)) - {type(None)}
        of_modules = bool(kinds) and all(issubclass(kind, nn.Module | Tensor) for kind in kinds)
        most = len(keys) if of_modules else 4 * EDGE
        self.seen.complete &= len(keys) <= most
        self.seen.values[f"{path}[]"] = (len(keys), *map(_words_in, (keys, parts) if len(keys) > most else ()))
        for number, (key, part) in enumerate(list(itertools.islice(zip(keys, parts, strict=True), most))):
            name = key if isinstance(key, str) else f"#{number}"
            inner = f"{path}.{name}" if of_modules else f"{path}[{name}]"
            if isinstance(value, dict):
                self._note_place(value, key, part, inner)
            self.visit(part, inner, depth)

    def _sequence(self, value: Any, path: str, depth: int) -> None:
        is_long = len(value) > 2 * EDGE
        self.seen.values[f"{path}[]"] = (len(value), _words_in(value) if is_long else None)
        numbers = (*range(EDGE), *range(len(value) - EDGE, len(value))) if is_long else range(len(value))
        for number in numbers:
            if isinstance(value, list):
                self._note_place(value, number, value[number], f"{path}[{number}]")
            self.visit(value[number], f"{path}[{number}]", depth)

    def _function(self, function: types.FunctionType, path: str, depth: int) -> None:
        """What a function can reach besides its arguments: its closure, its defaults, the globals that it names."""
        code = function.__code__
        own = is_users_file(code.co_filename)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if name == "__class__":  # of every method that calls super()
                continue
            try:
                part = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self._note_place(cell, None, part, f"{path}<{name}>")
            self.visit(part, path if name == "self" else f"{path}<{name}>", depth)
        if not own:
            return
        self.seen.codes.add(code)
        defaults = function.__defaults__ or ()
        named = zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
        for name, part in (*named, *(function.__kwdefaults__ or {}).items()):
            self.visit(part, f"{path}<{name}>", depth)
        if function.__dict__:
            self._table(function, function.__dict__, path, depth)
        (names, texts), package = names_in(code), function.__globals__.get("__package__")
        imported = {name: module for name in (*names, *texts) if (module := _imported(name, package)) is not None}
        entered = {id(function.__globals__)}
        for table in (function.__globals__, imported):
            self._namespace(table, (*names, *imported), f"{path}<{{}}>", depth, entered)

    def _namespace(
        self, table: dict[str, Any], names: Iterable[str], path: str, depth: int, entered: set[int], library: str = ""
    ) -> None:
        """What code names of a module, and of modules in it; of those of a library, only what it may change there."""
        for name in names:
            if name not in table or name.startswith("__"):
                continue
            part, inner = table[name], path.format(name)
            if isinstance(part, types.ModuleType):
                if id(vars(part)) not in entered and part.__name__.startswith(library):
                    entered.add(id(vars(part)))
                    below = "" if _is_own_module(part) else f"{part.__name__}."
                    self._namespace(vars(part), names, f"{inner}.{{}}", depth, entered, below)
            elif not library or type(part) in _OF_LIBRARIES:
                self._note_place(table, name, part, inner)
                self.visit(part, inner, depth)


class _FullWalk(_Walk):
    """A look that leaves nothing to samples, or says that it is not complete."""

    def __init__(self, skip: Skip, *, hold: bool) -> None:
        super().__init__(skip, hold=hold)
        self._cost = self._bytes = 0

    def _has_slots(self, kind: type) -> bool:
        return any(map(_slots_of, kind.__mro__))

    def visit(self, value: Any, path: str, depth: int) -> None:
        if not self.seen.complete or id(value) in self._visited:
            return
        super().visit(value, path, depth)
        kind: type = type(value)
        if _IS_WORD[kind]:
            self.seen.values[path] = kind, value  # 1 is not True
            return
        self._pay(OBJECT)
        self.seen.complete &= not _IS_ENGINE[kind]
        if isinstance(value, Tensor | np.ndarray) and path in self.seen.values:
            self.seen.values[path] = self.seen.values[path], self._sum_of(value)

    def _inside(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, set | frozenset):  # in whose order items may be made
            self._sequence(list(value), path, depth)
            return
        noted = len(self.seen.values)
        super()._inside(value, path, depth)
        is_known = isinstance(value, _FIXED) or hasattr(value, "__dict__") or self._has_slots(type(value))
        if not is_known and len(self.seen.values) == noted:
            self.seen.complete = False  # an object of an extension, such as a table, which cannot be looked into

    def _mapping(self, value: Any, path: str, depth: int) -> None:
        kind: Any = dict if isinstance(value, dict) else type(value)
        self._sequence([*kind.keys(value), *kind.values(value)], path, depth)

    def _sequence(self, value: Any, path: str, depth: int) -> None:
        self._pay(len(value))
        kinds = set(map(type, value))
        if kinds <= _KINDS:
            self.seen.values[f"{path}[]"] = hash((*value, *map(type, value)))
        elif kinds == {tuple} and set(map(type, itertools.chain.from_iterable(value))) <= _KINDS:
            self.seen.values[f"{path}[]"] = hash(tuple(value))  # as in a list of (path, label)
        else:
            self.seen.values[f"{path}[]"] = len(value)
            for number, part in enumerate(value):
                self.visit(part, f"{path}[{number}]", depth)

    def _sum_of(self, value: Any) -> int:
        """The sum of the words of an array; that their order is the same is seen in some places."""
        if value.is_shared() if isinstance(value, Tensor) else getattr(value, "mode", "c") != "c":
            return 0  # workers see what is written to its memory
        memory = memory_of(value)
        self._bytes += 0 if memory is None else memory.size
        if (memory is None and 0 not in value.shape) or self._bytes > MOST_ARRAY_BYTES:
            self.seen.complete = False
        return 0 if memory is None or not self.seen.complete else sum_of_words(memory)

    def _pay(self, entries: int) -> None:
        self._cost += entries
        self.seen.complete &= self._cost <= MOST_COMPARED


def is_ours(thing: Any) -> bool:
    """Whether it is a part of hotloop: an objective for models that return their loss, a `forward` that a lever set."""
    if isinstance(thing, functools.partial):
        thing = thing.func
    kind = thing if isinstance(thing, types.FunctionType) else type(thing)
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "hotloop"


class _Unseen:
    """An iterator such as `itertools.cycle`, which does not tell where it is: taken to have moved."""


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _imported(name: str, package: str | None) -> types.ModuleType | None:
    """The module that a function may import by this name."""
    return sys.modules.get(name) or (sys.modules.get(f"{package}.{name}") if package else None)


def _words_in(values: Collection[Any]) -> int | None:
    """A fingerprint of the numbers and words among many values; None of more than can be looked at."""
    if len(values) > LONG_LIST:
        return None
    kinds = set(map(type, values))
    return hash(tuple(values) if kinds <= _KINDS else tuple(each for each in values if type(each) in _KINDS))


def _mark(value: Any) -> Hashable:
    """A fingerprint of a tensor, an array, a generator, a piece of memory, or how far a file or a queue is filled."""
    if isinstance(value, Tensor):
        return _tensor_mark(value)
    try:
        if isinstance(value, io.IOBase):
            return value.tell() if value.writable() else None
        if isinstance(value, _MEMORY):
            value = np.asarray(memoryview(value).cast("B"))  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError):  # closed, without a position, or not of one piece
        return None
    if isinstance(value, SimpleQueue):
        return value.qsize()
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), _checksum(value, memory_of(np.asarray(value), LARGE))
    return _hash_of(Rng.of(value).get_state())


def _tensor_mark(tensor: Tensor) -> _Tensor:
    if not has_values(tensor) or not (type(tensor).__module__ == "torch" or isinstance(tensor, nn.Parameter)):
        return _Tensor((str(tensor.layout), str(tensor.dtype), id(tensor)))
    form = (tuple(tensor.shape), str(tensor.dtype))
    try:
        memory = None if tensor.is_quantized else memory_of(tensor)
    except RuntimeError:  # one of `torch.func`, without memory of its own
        memory = None
    if memory is None and tensor.numel():
        return _Tensor((*form, id(tensor), version_of(tensor)))
    return _Tensor((*form, _checksum(tensor, memory)))


def _checksum(value: Any, memory: Any) -> int:
    """Of all bytes of a small array; of a large one, those that lie evenly spread, and what else tells of a change."""
    if memory is None or memory.size <= LARGE:
        return 0 if memory is None else hash(memory.tobytes())
    if isinstance(value, Tensor):
        other = version_of(value)
    else:
        other = sum_of_words(memory) if memory.size <= WHOLE and value.flags.writeable else None
    words = memory[: memory.size - memory.size % 8].view(np.uint64)
    return hash((words[:: memory.size // LARGE].tobytes(), other))


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
    if not value.is_cpu or value.layout != torch.strided or not value.numel():
        return None
    steps = zip(value.shape, value.stride(), strict=True)
    extent = (1 + sum((size - 1) * stride for size, stride in steps)) * value.element_size()
    if value.storage_offset() * value.element_size() + extent > value.untyped_storage().nbytes():
        return None  # FSDP has freed it
    # By address: no operation of PyTorch, which a mode such as FakeTensorMode would take for one of the model.
    return np.frombuffer(memoryview((ctypes.c_uint8 * extent).from_address(value.data_ptr())), np.uint8)


def sum_of_words(memory: Any) -> int:
    """The sum of all words of some bytes, which does not tell their order."""
    whole = memory.size - memory.size % 8
    if memory.ctypes.data % 8:  # words must be aligned
        return int(memory.sum(dtype=np.uint64))
    return int(memory[:whole].view(np.uint64).sum()) + int(memory[whole:].sum()) * 2**64


def _hash_of(state: Any) -> int:
    parts = leaves(with_arrays(state))
    return hash(tuple([part.tobytes() if isinstance(part, np.ndarray) else part for part in parts]))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) <= EDGE and all(map(_is_plain, value))
    return type(value) in _WORDS


def _is_own_class(value: object) -> bool:
    return isinstance(value, type) and _is_own_type(value)


@functools.lru_cache(4096)
def _is_own_type(value: type) -> bool:
    """By its functions; a class without any, such as one that holds settings, by its module."""
    functions = (inner for inner in vars(value).values() if isinstance(inner, types.FunctionType))
    module = sys.modules.get(value.__module__)
    is_own = any(is_users_file(function.__code__.co_filename) for function in functions)
    return is_own or (module is not None and _is_own_module(module))


def _is_own_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" or (file is not None and is_users_file(file))
