"""`Snapshot`: what objects hold at one moment, noted one way and restored one way.

OOM retry, trials, captures, evaluation and guarded optimizer steps use it; they differ in what they note, and where.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from operator import is_
from typing import Any, Protocol, Self, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop._torch import (
    COPIED_SINGLY,
    OF_MODULES,
    buffers_of,
    copy_all,
    foreach_add_,
    parameters_of,
    version_of,
)
from hotloop.errors import MemoryWarning
from hotloop.memory.oom import is_out_of_memory, surely
from hotloop.printing.text import shorten
from hotloop.values.attributes import HOOKS_INSTALLED
from hotloop.values.kinds import (
    CONTAINERS,
    HELD,
    ROOM,
    WORD_KINDS,
    WORD_TYPES,
    Kinds,
    has_values,
    is_plain_array,
    is_plain_tensor,
    is_restored,
)
from hotloop.values.rng import Generator, Rng, quick_rng, rngs_of, same_state
from hotloop.values.tree import changeable_in, held_by, leaves, refill, same_items, same_value

FIRST_LOOKS = 4  # passes at the start that are all looked at
LOOK_EVERY = 257  # later passes; odd, so that each of two objectives has its looks
ONE_BY_ONE = 4000  # copies of tensors to begin with: by then they have taken as long as to load a kernel for many
SMALL = 2**16  # numbers in a tensor whose copy costs next to nothing

_HOST = torch.device("cpu")
E = TypeVar("E")


class Entry(Protocol):
    """One thing that a snapshot notes."""

    def take(self) -> None:
        """Note what it holds now."""

    def restore(self) -> None:
        """Give it back what it held."""


class Snapshot:
    """What some objects held; `restore` gives it back to them, `take` notes them anew.

    >>> weight, settings = torch.ones(2), {"lr": 0.1}
    >>> before = Snapshot().values([weight]).items([settings])
    >>> _, settings["lr"] = weight.zero_(), 1.0
    >>> before.restore()
    >>> weight.tolist(), settings
    ([1.0, 1.0], {'lr': 0.1})
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)

    @classmethod
    def of(cls, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> "Snapshot":
        """Modules and optimizers by reference: which tensors they hold, not a copy of them.

        To restore it exchanges pointers alone. What steps write into these tensors is noted by `values`.
        """
        inner = dict.fromkeys(m for module in modules for m in module.modules())
        owned = owned_tensors(modules, optimizers)
        held = [_Held(_pointers, _set_pointers, each) for each in owned]
        held += [_Held(_attributes, _set_attributes, each) for each in inner]
        return cls([*held, *map(_OptimizerState, optimizers)])

    def values(self, tensors: Iterable[Tensor], *, on_host: bool = False) -> Self:
        """The values of tensors, copied; to the host where the device has no room for copies."""
        if every := list(tensors):
            self.entries.append(_Values(every, on_host=on_host))
        return self

    def items(self, containers: Iterable[Any]) -> Self:
        """What dicts, lists, sets and deques hold, not copied."""
        self.entries += (_Held(held_by, refill, container) for container in containers)
        return self

    def gradients(self, parameters: Iterable[Tensor]) -> Self:
        """Which gradient each parameter has, not copied."""
        self.entries.append(Gradients(list(parameters)))
        return self

    def rngs(self, rngs: Iterable[Rng]) -> Self:
        """The states of generators."""
        self.entries += (_RngState(rng) for rng in rngs)
        return self

    def take(self) -> None:
        """Note all of it anew."""
        for entry in self.entries:
            entry.take()

    def restore(self) -> None:
        """Give back what was noted, in the order in which it was."""
        for entry in self.entries:
            entry.restore()


def owned_tensors(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The weights and buffers of modules and optimizers, each once."""
    inner = dict.fromkeys(m for module in modules for m in module.modules())
    every = [t for m in inner for t in [*parameters_of(m).values(), *buffers_of(m).values()] if t is not None]
    every += [p for o in optimizers for group in o.param_groups for p in group["params"]]
    return list({id(tensor): tensor for tensor in every}.values())


class _Held:
    """What something holds, by a function that gets it and one that gives it back."""

    def __init__(self, get: Callable[[Any], Any], give_back: Callable[[Any, Any], object], what: Any) -> None:
        self._get, self._give_back, self.what = get, give_back, what
        self.take()

    def take(self) -> None:
        self.held = self._get(self.what)

    def restore(self) -> None:
        self._give_back(self.what, self.held)


def _pointers(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Which memory a tensor has, and which gradient."""
    return tensor.data, tensor.grad if tensor.is_leaf else None


def _set_pointers(tensor: Tensor, held: tuple[Tensor, Tensor | None]) -> None:
    tensor.data, tensor.grad = held


def _attributes(module: nn.Module) -> tuple[dict[str, Any], frozenset[str], dict[str, Any]]:
    """What a module holds besides the values of its weights: numbers, words and tensors, names, buffers."""
    words_and_tensors = {
        name: value
        for name, value in vars(module).items()
        if name != HOOKS_INSTALLED
        and (isinstance(value, WORD_TYPES) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)))
    }
    return words_and_tensors, frozenset(vars(module)), dict(buffers_of(module))


def _set_attributes(module: nn.Module, held: tuple[dict[str, Any], frozenset[str], dict[str, Any]]) -> None:
    values, names, buffers = held
    for added in vars(module).keys() - names - {HOOKS_INSTALLED}:
        del vars(module)[added]
    vars(module).update(values)
    refill(buffers_of(module), buffers)


class _OptimizerState:
    """The state and the settings of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.take()

    def take(self) -> None:
        self._state = self._optimizer.state
        self._contents = _Contents([self._state], copies=lambda value: False)
        self._settings = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]

    def restore(self) -> None:
        if self._optimizer.state is not self._state:  # a state_dict was loaded
            self._optimizer.state = self._state
        self._contents.restore()
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)


class _Contents:
    """What the containers in some values hold, and the values of the tensors and arrays in them."""

    def __init__(
        self,
        values: Sequence[Any],
        copies: Callable[[Any], bool],
        device: torch.device = _HOST,
        room: float = math.inf,
    ) -> None:
        """`copies`: whether a tensor or an array is copied; `room`: bytes of those in a container."""
        self.values, self._copies, self._device, self._room = values, copies, device, room
        self.take()

    def take(self) -> None:
        inside = [(part, number) for number, value in enumerate(self.values) for part in changeable_in(value)]
        copied = [(part, number) for part, number in inside if not CONTAINERS[type(part)] and self._copies(part)]
        bytes_of: Counter[int] = Counter()
        for part, number in copied:
            bytes_of[number] += part.nbytes if part is not self.values[number] else 0
        copied = [(part, number) for part, number in copied if bytes_of[number] <= self._room]
        copies = surely(lambda: [_copy_of(part) for part, _ in copied], self._device)
        self.containers = [(part, held_by(part), number) for part, number in inside if CONTAINERS[type(part)]]
        pairs = zip(copied, copies, strict=True)
        self.copied = [(part, copy, _version(part), number) for (part, number), copy in pairs]

    def changed(self, *, deep: bool = False) -> set[int]:
        """The numbers of the values that have changed; `deep`: not counting what is put into or taken out of them."""
        tops = set(map(id, self.values)) if deep else set()
        changed = {n for each, held, n in self.containers if id(each) not in tops and not same_items(each, held)}
        return changed | {n for part, copy, version, n in self.copied if _is_written(part, copy, version)}

    @torch.no_grad()
    def restore(self) -> None:
        for container, held, _ in self.containers:
            refill(container, held)
        if any(_is_written(part, copy, version) for part, copy, version, _ in self.copied):
            for part, copy, version, _ in self.copied:
                if isinstance(part, Tensor):
                    part.copy_(copy)
                elif _is_written(part, copy, version):  # else it may be read-only
                    part[...] = copy


_NOTHING = _Contents([], bool)


class _Values:
    """The values of tensors, copied."""

    def __init__(self, tensors: Sequence[Tensor], *, on_host: bool = False) -> None:
        self.tensors = tensors
        self._on_host = on_host
        copies = [self._copy(tensor.detach()) for tensor in tensors]
        kinds = {(t.dtype, t.device, c.device): None for t, c in zip(tensors, copies, strict=True)}
        pairs = list(zip(tensors, copies, strict=True))
        self._copied = 0  # tensors, so far
        # Many tensors of one kind are copied in one kernel.
        self._alike = [
            tuple(zip(*(p for p in pairs if (p[0].dtype, p[0].device, p[1].device) == kind), strict=True))
            for kind in kinds
        ]

    def take(self) -> None:
        for tensors, copies in self._alike:
            self._copy_all(copies, tensors)

    def restore(self) -> None:
        for tensors, copies in self._alike:
            self._copy_all(tensors, copies)

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._on_host:
            return tensor.clone() if tensor.is_cpu else tensor.cpu()
        try:
            return tensor.clone()
        except Exception as error:
            if tensor.is_cpu or not is_out_of_memory(error):
                raise
        return tensor.cpu()

    def _copy_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._copied += len(targets)
        copy_all(targets, sources, COPIED_SINGLY if self._copied > ONE_BY_ONE else len(targets))


class Gradients:
    """Which gradient each parameter has."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.take()

    def take(self) -> None:
        self._gradients = [parameter.grad for parameter in self._parameters]

    def restore(self) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def add(self) -> None:
        """The gradients that were noted, with those that are there now added to them."""
        noted, added = [], []
        for parameter, was in zip(self._parameters, self._gradients, strict=True):
            now = parameter.grad
            if was is None:
                continue
            if now is None:
                parameter.grad = was
            elif was.is_sparse or now.is_sparse:
                parameter.grad = was + now
            else:
                parameter.grad = was
                noted.append(was)
                added.append(now)
        if noted:
            foreach_add_(noted, added)


class _RngState(_Held):
    """The state of a generator."""

    what: Rng

    def __init__(self, rng: Rng) -> None:
        super().__init__(lambda rng: rng.get_state(), lambda rng, state: rng.set_state(state), rng)

    def is_changed(self) -> bool:
        return not same_state(self.held, self.what.get_state())


class _Attributes:
    """What a table of attributes or settings holds: words, containers, tensors and arrays."""

    def __init__(self, table: dict[str, Any], device: torch.device, name: str = "") -> None:
        self.table, self.name, self._device = table, name, device
        self.take()

    def take(self) -> None:
        self._values = _own_values(self.table)
        inside = {name: value for name, value in self._values.items() if not _is_fixed(value)}  # few have any
        self._names = list(inside)
        self._contents = _Contents([*inside.values()], _has_plain_values, self._device, ROOM) if inside else _NOTHING

    def changed(self) -> list[str]:
        """Names of attributes that are no longer what they were."""
        now, before = _own_values(self.table), self._values
        other: Iterable[str] = ()
        if now.keys() != before.keys() or not all(map(is_, now.values(), before.values())):  # few do
            other = [n for n in now.keys() | before.keys() if not same_value(now.get(n), before.get(n))]
        return sorted({*other, *(self._names[number] for number in self._contents.changed())})

    def restore(self) -> None:
        for added in _own_values(self.table).keys() - self._values.keys():
            del self.table[added]
        self.table.update(self._values)
        self._contents.restore()


class _Buffers(_Contents):
    """Tables of buffers: which tensors are in them, and the values of these."""

    def __init__(self, tables: Sequence[dict[str, Any]], device: torch.device) -> None:
        super().__init__(tables, has_values, device)

    @torch.no_grad()
    def restore(self) -> None:
        for table, before, _ in self.containers:
            refill(table, before)
        for tensor, copy, *_ in self.copied:  # kernels such as those of BatchNorm do not count what they write
            tensor.copy_(copy)

    def exchanged(self) -> list[dict[str, Any]]:
        """Tables in which other tensors are than before."""
        return [table for table, before, _ in self.containers if not same_items(table, before)]

    def written(self) -> list[Tensor]:
        """Tensors that were written, or may have been; and those beside them in their tables."""
        tables = {table for t, copy, version, table in self.copied if _may_be_written(t, copy, version)}
        return [tensor for tensor, _, _, table in self.copied if table in tables]  # a module may write to all of them


@dataclass
class _Changing:
    """What passes were seen to change."""

    weights: list[nn.Parameter]
    rngs: list[Rng] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)  # buffers
    exchanged: list[dict[str, Any]] = field(default_factory=list)  # tables of buffers, in which other tensors were put
    attributes: list[dict[str, Any]] = field(default_factory=list)  # of modules, and settings of optimizers
    batch: bool = False

    def things(self) -> list[object]:
        return [*self.rngs, *self.written, *self.exchanged, *self.attributes, *self.weights]

    def snapshot(self, device: torch.device) -> Snapshot:
        """A snapshot of all of it but weights and the batch."""
        made = Snapshot(_Attributes(table, device) for table in self.attributes).rngs(self.rngs)
        made.entries += [_Buffers(self.exchanged, device)] if self.exchanged else []
        return made.values(self.written)


class _PassRngs:
    """Generators that a pass may draw from, by names for a person: global ones, those given, those of modules."""

    def __init__(self, device: torch.device, generators: Mapping[str, Generator]) -> None:
        every = rngs_of(device)
        given = {Rng.of(generator): name for name, generator in generators.items()}
        self.names = {rng: f"the rng of {name}" for name, rng in every.items()} | given
        covered, self.quick = quick_rng(device)
        self.covered = every[covered]  # by `quick`
        self._of_modules: dict[int, Generator] = {}

    def find_in(self, modules: Iterable[nn.Module]) -> None:
        """Find generators that modules have for themselves."""
        for inner in modules:
            for name, value in vars(inner).items():
                if name not in _OF_MODULES and _GENERATORS[type(value)] and id(value) not in self._of_modules:
                    self._of_modules[id(value)] = value
                    self.names[Rng.of(value)] = f"{type(inner).__name__}.{name}"


_BATCH = object()  # stands for whichever batch a pass has


class PassSnapshot:
    """What a forward and backward pass changes besides gradients: rng states, buffers, attributes, the batch.

    To note all of it before every pass would cost more than a small network takes. So a few passes are looked at
    closely, the first ones and one in many later. The others note what those were seen to change, and the rng state
    of the device, which costs a microsecond or two on a GPU and ten on a CPU. A pass that fails is repeated; that
    repetition is looked at again, and what it changes that was not noted before the failure is named in a warning.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        generators: Mapping[str, Generator] | None = None,
        weights: Iterable[nn.Parameter] = (),
    ) -> None:
        """`generators` are those that somebody else than a module holds, by name; `weights`, what passes write to."""
        self._modules, self._device = modules, device
        self.groups: Callable[[], Iterable[dict[str, Any]]] = list  # settings of optimizers, which a pass may change
        self._rngs = _PassRngs(device, generators or {})
        self._quick = self._rngs.quick  # noted before every pass
        self._rng_state: Any = None  # that of the device before the pass
        self._outer: tuple[Any, Any] | None = None  # a batch that can be taken from, and what it held
        self._changing = _Changing(weights=list(weights))
        self._versions: list[tuple[nn.Parameter, int | None]] = []  # of all weights, before a pass that is looked at
        self._passes = 0
        self._unwatched = 0  # passes to come before which only the rng state of the device is noted
        self.is_looking = False  # whether this pass is looked at
        self._now = Snapshot()  # of this pass
        self._usual = Snapshot()  # of a pass that is not looked at
        self._noted: set[int] | None = None  # after a failure: ids of what had been noted before it

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """Parameters that passes were seen to write to."""
        return self._changing.weights

    def look_again(self) -> None:
        """Look closely at the next passes: they may change what earlier ones did not."""
        self._passes = self._unwatched = 0

    @property
    def has_seen_passes(self) -> bool:
        """Whether the first ones have been."""
        return self._passes >= FIRST_LOOKS

    def take(self, batch: Any = None) -> None:
        """Before a pass over a batch, or over something that a pass does not change."""
        self._rng_state = self._quick.get_state()
        kind = type(batch)
        if kind is list:
            self._outer = (batch, batch[:])
        elif kind is tuple or batch is None or not CONTAINERS[kind]:
            self._outer = None
        else:
            self._outer = (batch, held_by(batch))
        if self._unwatched:  # most passes, so that every call counts
            self._unwatched -= 1
            return
        self.is_looking = self._passes < FIRST_LOOKS or self._passes % LOOK_EVERY == 0
        self._passes += 1
        if self.is_looking:
            self._now = self._everything()
        else:
            self._now = self._usual
            self._usual.take()
        if batch is not None and (self.is_looking or self._changing.batch):
            self._now = Snapshot([*self._now.entries, _Contents([batch], _can_be_copied, self._device)])
        if self._changing.weights:
            self._now = Snapshot(self._now.entries).values(self._changing.weights)

    def learn(self) -> None:
        """After a pass that was looked at and went well: see what it changed, and note only that from now on."""
        self.is_looking = False
        touched: list[tuple[object, str]] = []
        self._see_rngs(touched)
        self._see_attributes(touched)
        self._see_buffers(touched)
        self._see_weights_and_batch(touched)
        self._now, self._usual = Snapshot(), self._changing.snapshot(self._device)
        if self.has_seen_passes and not (self._usual.entries or self._changing.batch or self._changing.weights):
            self._unwatched = -self._passes % LOOK_EVERY
            self._passes += self._unwatched  # as if they had been noted
        self._tell_of_unnoted(touched)

    def restore(self) -> None:
        """After a pass that failed: everything as it was noted. The pass that follows is looked at."""
        self._quick.set_state(self._rng_state)
        self._now.restore()
        if self._outer is not None:
            refill(*self._outer)
        if self._noted is None:
            self._noted = {id(self._rngs.covered), *map(id, self._things())}
        if self.is_looking:
            self._passes -= 1  # what it would have shown is still to be seen
        else:
            self.look_again()
        self.is_looking = False
        self._now = Snapshot()

    def _everything(self) -> Snapshot:
        """All that a pass may change, but for weights, of which there may be too many."""
        modules = self._inner()
        self._rngs.find_in(modules)
        parameters = (p for inner in modules for p in parameters_of(inner).values() if p is not None and not is_lazy(p))
        self._versions = [(p, version_of(p)) for p in parameters]
        tables = [table for table in map(buffers_of, modules) if table]
        attributes = [_Attributes(vars(inner), self._device, type(inner).__name__) for inner in modules]
        attributes += [_Attributes(group, self._device, "optimizer.param_groups") for group in self.groups()]
        return Snapshot([*attributes, _Buffers(tables, self._device)]).rngs(self._rngs.names)

    def _see_rngs(self, touched: list[tuple[object, str]]) -> None:
        names, changing = self._rngs.names, self._changing
        used = [entry.what for entry in self._entries(_RngState) if entry.is_changed()]
        touched += [(rng, names[rng]) for rng in used]
        known = (*used, *changing.rngs)
        changing.rngs = [rng for rng in names if rng in known and rng is not self._rngs.covered]

    def _see_attributes(self, touched: list[tuple[object, str]]) -> None:
        moved = [(each, each.changed()) for each in self._entries(_Attributes)]
        touched += [(each.table, f"{each.name}.{name}") for each, changed in moved for name in changed]
        known = {id(table) for table in self._changing.attributes}
        self._changing.attributes = [each.table for each, changed in moved if changed or id(each.table) in known]

    def _see_buffers(self, touched: list[tuple[object, str]]) -> None:
        (buffers,), changing = self._entries(_Buffers), self._changing
        known = {id(table) for table in (*changing.exchanged, *buffers.exchanged())}
        changing.exchanged = [table for table in buffers.values if id(table) in known]
        held = {id(value) for table, before, _ in buffers.containers if id(table) in known for value in before.values()}
        every = {id(tensor): tensor for tensor in (*changing.written, *buffers.written())}
        changing.written = [tensor for tensor in every.values() if id(tensor) not in held]
        if self._noted is not None:  # a pass that is repeated may wait for the device
            names = {id(b): f"{type(m).__name__}.{n}" for m in self._inner() for n, b in buffers_of(m).items()}
            touched += [
                (t, names[id(t)]) for t, copy, *_ in buffers.copied if id(t) in names and not torch.equal(t, copy)
            ]
        touched += [(table, "a buffer") for table in changing.exchanged]

    def _see_weights_and_batch(self, touched: list[tuple[object, str]]) -> None:
        changing = self._changing
        wrote = [p for p, version in self._versions if version_of(p) != version]
        touched += [(p, "weights") for p in wrote]
        changing.weights = list({id(p): p for p in (*changing.weights, *wrote)}.values())
        self._versions = []
        if any(entry.changed(deep=True) for entry in self._entries(_Contents)):
            touched += [] if changing.batch else [(_BATCH, "its batch")]
            changing.batch = True

    def _entries(self, kind: type[E]) -> list[E]:
        return [entry for entry in self._now.entries if type(entry) is kind]

    def _things(self) -> Iterator[object]:
        """What was noted before this pass."""
        yield from self._changing.things()
        if self.is_looking:  # all but weights
            yield from (*self._rngs.names, _BATCH, *(entry.table for entry in self._entries(_Attributes)))
            for entry in self._entries(_Buffers):
                yield from (*entry.values, *(tensor for tensor, *_ in entry.copied))

    def _tell_of_unnoted(self, touched: Iterable[tuple[object, str]]) -> None:
        """After the repetition of a pass that failed: name what it changes that was not noted before the failure."""
        noted, self._noted = self._noted, None
        if noted is None:
            return
        new = list(dict.fromkeys(name for what, name in touched if id(what) not in noted))
        if new:
            warnings.warn(
                f"memory ran out in a step that changes {shorten(new, 3)}, which earlier steps did not: what the failed"
                " attempt changed of it is not restored",
                MemoryWarning,
                stacklevel=2,
            )

    def _inner(self) -> Iterable[nn.Module]:
        return dict.fromkeys(inner for module in self._modules for inner in module.modules())


# What every module or group has, which is looked after elsewhere, and what stays with the hooks that it tells of.
_OF_MODULES = OF_MODULES | {"params", HOOKS_INSTALLED}
_GENERATORS = Kinds(lambda kind: issubclass(kind, get_args(Generator)))


def _own_values(table: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in table.items()
        if name not in _OF_MODULES and (HELD[type(value)] or is_restored(value))
    }


def _is_fixed(value: Any) -> bool:
    kind = type(value)
    return kind in WORD_KINDS or (kind is tuple and WORD_KINDS.issuperset(map(type, value)))


def _has_plain_values(value: Any) -> bool:
    return is_plain_tensor(value) or is_plain_array(value)


def _can_be_copied(value: Any) -> bool:
    return value.layout == torch.strided if isinstance(value, Tensor) else is_plain_array(value)


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _version(value: Any) -> int | None:
    return version_of(value) if isinstance(value, Tensor) else None


def _is_written(value: Any, was: Any, version: int | None) -> bool:
    return version_of(value) != version if isinstance(value, Tensor) else value.tobytes() != was.tobytes()


def _may_be_written(tensor: Tensor, copy: Tensor, version: int | None) -> bool:
    """Whether a pass has written to a tensor, or may have: kernels such as those of BatchNorm do not count it.

    Values on a device cannot be compared without a synchronization, so what is small there is taken to be written.
    """
    if version is None or version_of(tensor) != version:
        return True
    if tensor.is_cpu:
        return not torch.equal(tensor, copy)
    return tensor.is_floating_point() and tensor.numel() <= SMALL


def objects_in(batch: Any) -> list[object]:
    """Objects of a batch besides its containers, tensors and words: no snapshot restores what they hold."""
    return [leaf for leaf in leaves(batch, is_dataclass) if not (is_restored(leaf) or isinstance(leaf, Tensor))]
