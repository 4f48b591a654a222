"""`Rewind`: what a pass changes besides gradients, noted before it and put back when it fails."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotloop.errors import MemoryWarning
from hotloop.memory.oom import surely
from hotloop.placement import tensors_in
from hotloop.rng import Generator, Rng, quick_rng, rngs_of, same_state
from hotloop.text import shorten

FIRST_LOOKS = 4  # passes at the start that are all looked at
LOOK_EVERY = 257  # later passes; odd, so that each of two turns has its looks
SMALL = 2**16  # numbers in a tensor whose copy costs next to nothing


_BATCH = object()  # stands for whichever batch a pass has


class Rewind:
    """The rng states, the buffers and attributes of modules, and the batch, as they were before a pass.

    To note all of them before every pass would cost more than a small network takes. So a few passes are looked at
    closely, the first ones and one in many later, and only what they were seen to change is noted in the others, and
    the rng state of the device, which costs a microsecond or two. A pass that fails is repeated; that repetition is
    looked at again, and what it changes that was not noted before the failure is named in a warning.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, generators: Mapping[str, Generator] | None = None
    ) -> None:
        """`generators` are those that somebody else than a module holds, by name."""
        self._modules = modules
        self._device = device
        self.groups: Callable[[], Iterable[dict[str, Any]]] = list  # settings of optimizers, which a pass may change
        every = rngs_of(device)
        own = {name: Rng.of(generator) for name, generator in (generators or {}).items()}
        self._rngs = [*every.values(), *own.values()]
        self._names = {id(rng): f"the rng of {name}" for name, rng in every.items()}
        self._names |= {id(rng): name for name, rng in own.items()}
        self._covered = [every["cuda" if device.type == "cuda" else "torch"]]  # noted before every pass, in a quick way
        quick = quick_rng(device)
        self.take, self._give = quick.get_state, quick.set_state
        self.taken: Any = None  # the rng state of the device before the pass
        self.given: tuple[Any, Any] | None = None  # a batch that can be taken from, and what it held
        self._cast: list[Rng] = []  # those that passes were seen to use
        self._written: list[tuple[list[Tensor], list[Tensor]]] = []  # what passes were seen to write to, and copies
        self._changing: list[dict[str, Any]] = []  # tables in which passes were seen to put other tensors
        self._attributed: list[dict[str, Any]] = []  # of modules and settings, those that passes were seen to change
        self._weights: list[tuple[nn.Parameter, int]] = []  # how often each was written before the pass
        self._writes_weights: list[nn.Parameter] = []  # those that passes were seen to write to
        self._copies: list[Tensor] = []  # of these
        self._writes_batch = False  # whether passes were seen to write into their batch
        self._passes = 0
        self.quiet = 0  # passes to come before which there is nothing to note but PyTorch's rng states
        self.looking = False  # whether the pass is looked at
        self._unnoted: set[int] | None = None  # after a failure: ids of what had been noted before it
        self._states: list[tuple[Rng, Any]] = []
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []  # what they held before the pass
        self._held: list[tuple[Tensor, Tensor, int | None]] = []  # tensors in those, their copies and versions
        self._attributes: list[_Attributes] = []
        self._batch: _Batch | None = None

    def look_again(self) -> None:
        """Look closely at the next passes: they may change what earlier ones did not."""
        self._passes = self.quiet = 0

    def note(self, batch: Any = None) -> None:
        """Before a pass over a batch, or over something that a pass does not change."""
        if self.quiet:  # most passes, so that every call in here counts
            self.quiet -= 1
            self.taken = self.take()
            kind = type(batch)
            if kind is list:
                self.given = (batch, batch[:])
            elif kind is tuple or batch is None:
                self.given = None
            else:
                self.given = (batch, _shallow(batch)) if _is_container(batch) else None
            return
        self.given = None
        self.taken = self.take()
        self.looking = self._passes < FIRST_LOOKS or self._passes % LOOK_EVERY == 0
        self._passes += 1
        self._batch = None
        if batch is not None and (self.looking or self._writes_batch):
            self._batch = _Batch(batch, self._device)
        elif _is_container(batch):
            self.given = (batch, _shallow(batch))
        if self.looking:
            for rng, name in self._own_rngs():
                if rng not in self._rngs:
                    self._rngs.append(rng)
                    self._names[id(rng)] = name
            self._hold(self._own_tables())
            self._attributes = [_Attributes(table, name) for table, name in self._own_attributes()]
            self._states = [(rng, rng.get_state()) for rng in self._rngs]
            self._weights = [(p, p._version) for p in self._parameters()]
            self._copy_weights()
            return
        self._states = [(rng, rng.get_state()) for rng in self._cast]
        for tensors, copied in self._written:
            torch._foreach_copy_(copied, tensors)
        if self._changing:
            self._hold(self._changing)
        if self._attributed:
            self._attributes = [_Attributes(table, "") for table in self._attributed]
        self._copy_weights()

    def _copy_weights(self) -> None:
        if self._writes_weights:
            self._copies = surely(lambda: [p.detach().clone() for p in self._writes_weights], self._device)

    def settle(self) -> None:
        """After a pass that went well."""
        if not self.looking:
            return
        self.looking = False
        self._learn()
        tensors = self._written or self._changing or self._writes_batch or self._writes_weights
        if self._passes >= FIRST_LOOKS and not (self._cast or self._attributed or tensors):
            self.quiet = -self._passes % LOOK_EVERY
            self._passes += self.quiet  # as if they had been noted

    def put(self) -> None:
        """After a pass that failed: everything as it was noted. The pass that follows is looked at."""
        self._give(self.taken)
        for rng, state in self._states:
            rng.set_state(state)
        for table, before in self._tables:
            table.clear()
            table.update(before)
        for attributes in self._attributes:
            attributes.restore()
        with torch.no_grad():
            for tensor, copy in [(t, c) for t, c, _ in self._held] + self._copied_weights():
                tensor.copy_(copy)
            if not self.looking:  # else everything is held, and these copies are of an earlier pass
                for tensors, copies in self._written:
                    torch._foreach_copy_(tensors, copies)
        if self._unnoted is None:
            written = chain.from_iterable(tensors for tensors, _ in self._written)
            noted: Iterable[object] = (*self._covered, *self._cast, *written, *self._changing, *self._attributed)
            if self.looking:  # everything is noted but weights, of which there may be too many
                held = (tensor for tensor, _, _ in self._held)
                noted = (*self._rngs, *held, *(t for t, _ in self._tables), *(each.table for each in self._attributes))
                noted = (*noted, _BATCH)
            self._unnoted = {id(each) for each in (*noted, *self._writes_weights)}
        if self.looking:
            self._passes -= 1  # what it would have shown is still to be seen
        else:
            self.look_again()
        self.looking = False
        self._attributes = []
        if self._batch is not None:
            self._batch.restore()
        if self.given is not None:
            _refill(*self.given)

    def _hold(self, tables: Iterable[dict[str, Any]]) -> None:
        """Note what tables hold, and the values of the tensors among it."""
        noted = [(table, dict(table)) for table in tables]
        tensors = {id(b): b for _, before in noted for b in before.values() if _is_plain(b)}.values()
        copies = surely(lambda: [tensor.detach().clone() for tensor in tensors], self._device)
        self._held = [(t, copy, _writes(t)) for t, copy in zip(tensors, copies, strict=True)]
        self._tables = noted

    def _learn(self) -> None:
        """See what the pass has changed, and note only that from now on."""
        used = [rng for rng, state in self._states if not same_state(state, rng.get_state())]
        touched: list[tuple[object, str]] = [(rng, self._names[id(rng)]) for rng in used]
        self._cast = [r for r in self._rngs if (r in used or r in self._cast) and r not in self._covered]
        if self._batch is not None and self._batch.is_changed():
            if not self._writes_batch:
                touched.append((_BATCH, "its batch"))
            self._writes_batch = True
        moved = [(each, each.changed()) for each in self._attributes]
        touched += [(each.table, f"{each.name}.{name}") for each, changed in moved for name in changed]
        known = {id(table) for table in self._attributed}
        self._attributed = [each.table for each, changed in moved if changed or id(each.table) in known]
        wrote = [p for p, version in self._weights if p._version != version]
        touched += [(p, "weights") for p in wrote]
        self._writes_weights = list({id(p): p for p in (*self._writes_weights, *wrote)}.values())
        names = {id(b): f"{type(m).__name__}.{n}" for m in self._inner() for n, b in m._buffers.items()}
        known = {id(table) for table in self._changing}
        self._changing = [t for t, before in self._tables if id(t) in known or _is_other(t, before)]
        known = {id(table) for table in self._changing}
        covered = {id(v) for table, before in self._tables if id(table) in known for v in before.values()}
        written = {id(tensor) for tensors, _ in self._written for tensor in tensors}
        written |= {id(tensor) for tensor, copy, version in self._held if _may_be_written(tensor, copy, version)}
        for _, before in self._tables:
            if not written.isdisjoint(map(id, before.values())):  # a module that writes to one may write to all
                written.update(map(id, before.values()))
        kept = [(tensor, copy) for tensor, copy, _ in self._held if id(tensor) in written - covered]
        alike = {t.dtype: [pair for pair in kept if pair[0].dtype == t.dtype] for t, _ in kept}  # copied in one kernel
        self._written = [([t for t, _ in pairs], [copy for _, copy in pairs]) for pairs in alike.values()]
        if self._unnoted is not None:  # a pass that is repeated may wait for the device
            touched += [(t, names[id(t)]) for t, copy, _ in self._held if id(t) in names and not torch.equal(t, copy)]
        touched += [(t, "a buffer") for t in self._changing]
        self._states, self._tables, self._held, self._attributes = [], [], [], []
        self._weights, self._copies = [], []
        self._tell_of_unnoted(touched)

    def _tell_of_unnoted(self, touched: Iterable[tuple[object, str]]) -> None:
        """After the repetition of a pass that failed: name what it changes that was not noted before the failure."""
        noted, self._unnoted = self._unnoted, None
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

    def _copied_weights(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._writes_weights, self._copies, strict=True)) if self._copies else []

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for inner in self._inner() for p in inner._parameters.values() if p is not None and not is_lazy(p))

    def _own_attributes(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Where modules keep what is neither a weight nor a buffer, and optimizers their settings."""
        yield from ((vars(inner), type(inner).__name__) for inner in self._inner())
        yield from ((group, "optimizer.param_groups") for group in self.groups())

    def _own_tables(self) -> Iterator[dict[str, Any]]:
        """Where modules keep their buffers."""
        return (inner._buffers for inner in self._inner() if inner._buffers)

    def _own_rngs(self) -> Iterator[tuple[Rng, str]]:
        """Generators that modules have for themselves."""
        for inner in self._inner():
            for name, value in vars(inner).items():
                if isinstance(value, Generator):
                    yield Rng.of(value), f"{type(inner).__name__}.{name}"

    def _inner(self) -> Iterable[nn.Module]:
        return dict.fromkeys(inner for module in self._modules for inner in module.modules())


def _is_plain(buffer: Any) -> bool:
    return isinstance(buffer, Tensor) and buffer.layout == torch.strided and not buffer.is_meta and not is_lazy(buffer)


def _is_other(table: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether other tensors are in a table than before, whatever their values."""
    return table.keys() != before.keys() or any(table[name] is not tensor for name, tensor in before.items())


def _may_be_written(tensor: Tensor, copy: Tensor, version: int | None) -> bool:
    """Whether a pass has written to a tensor, or may have: kernels such as those of BatchNorm do not count it.

    Values on a device cannot be compared without a wait, so what is small there is taken to be written.
    """
    if version is None or _writes(tensor) != version:
        return True
    if tensor.device.type == "cpu":
        return not torch.equal(tensor, copy)
    return tensor.is_floating_point() and tensor.numel() <= SMALL


def _writes(tensor: Tensor) -> int | None:
    """How often a tensor was written; None for an inference tensor, which does not count."""
    return None if tensor.is_inference() else tensor._version


_OF_MODULES = frozenset((*vars(nn.Module()), "params"))  # what every module or group has: looked after elsewhere
_VALUES = (int, float, complex, bool, str, bytes, type(None), tuple, frozenset)


class _Attributes:
    """What a table of attributes or settings holds: numbers, words, tensors, and what is in its containers."""

    def __init__(self, table: dict[str, Any], name: str) -> None:
        self.table, self.name = table, name
        self._values = _own_values(table)
        self._contents = [(value, _shallow(value)) for value in self._values.values() if _is_container(value)]
        tensors = [value for value in self._values.values() if type(value) is Tensor and _is_plain(value)]
        self._tensors = [(t, t.detach().clone(), _writes(t)) for t in tensors if t.grad_fn is None]

    def changed(self) -> list[str]:
        """Names of attributes that are no longer what they were."""
        now = _own_values(self.table)
        other = [n for n in now.keys() | self._values.keys() if not _same_value(now.get(n), self._values.get(n))]
        inside = {id(container) for container, before in self._contents if not _same_items(container, before)}
        inside |= {id(tensor) for tensor, _, version in self._tensors if _writes(tensor) != version}
        return sorted({*other, *(name for name, value in self._values.items() if id(value) in inside)})

    @torch.no_grad()
    def restore(self) -> None:
        for added in _own_values(self.table).keys() - self._values.keys():
            del self.table[added]
        self.table.update(self._values)
        for container, before in self._contents:
            _refill(container, before)
        for tensor, values, version in self._tensors:
            if _writes(tensor) != version:
                tensor.copy_(values)


class _Batch:
    """A batch as it was: what its containers hold, and the values of its tensors."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._contents = [(each, _shallow(each)) for each in _containers(batch)]
        every = [each for _, each in tensors_in(batch) if each.layout == torch.strided]
        self._copies = surely(lambda: [(each, each.detach().clone()) for each in every], device)
        self._versions = [(each, _writes(each)) for each in every]

    def is_changed(self) -> bool:
        """Whether a pass wrote into it, or took something out of it that lies deep."""
        nested = any(not _same_items(container, before) for container, before in self._contents[1:])
        return nested or any(_writes(each) != version for each, version in self._versions)

    @torch.no_grad()
    def restore(self) -> None:
        for container, before in self._contents:
            _refill(container, before)
        if any(_writes(each) != version for each, version in self._versions):
            for tensor, values in self._copies:
                tensor.copy_(values)


def _containers(batch: Any) -> Iterator[Any]:
    """The lists and dicts of a batch, the outermost first."""
    if _is_container(batch):
        yield batch
    elif not isinstance(batch, tuple):
        return
    for part in batch.values() if isinstance(batch, MutableMapping) else batch:
        yield from _containers(part)


def _own_values(table: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in table.items()
        if name not in _OF_MODULES
        and (isinstance(value, _VALUES) or _is_container(value) or (type(value) is Tensor and _is_plain(value)))
    }


def _is_container(value: object) -> bool:
    return isinstance(value, list | dict | set | deque | MutableMapping)


def _shallow(container: Any) -> Any:
    return dict(container) if isinstance(container, MutableMapping) else list(container)


def _refill(container: Any, before: Any) -> None:
    """Give a container back what it held; the container stays the same one, since others may hold it too."""
    if _same_items(container, before):
        return
    if isinstance(container, list):
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


def _same_items(container: Any, before: Any) -> bool:
    if isinstance(before, dict):
        return container.keys() == before.keys() and all(_same_value(container[k], v) for k, v in before.items())
    return len(container) == len(before) and all(map(_same_value, container, before))


def _same_value(a: Any, b: Any) -> bool:
    """Whether two values are one, or plain and equal; never a question to a tensor."""
    return a is b or (type(a) is type(b) and type(a) in (int, float, str, bool) and a == b)
