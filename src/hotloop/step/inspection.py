"""Whether a step runs the same operations each time, or what a capture would freeze and in which line."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotloop._torch import DispatchMode, storage_id
from hotloop.placement.moving import has_strides
from hotloop.placement.sites import Site, user_site
from hotloop.placement.waits import Waits, waits
from hotloop.printing.text import shorten
from hotloop.step.constants import made_on_device
from hotloop.step.dispatching import is_few, name_of, values_of
from hotloop.step.draws import Draw, HostDraws
from hotloop.values.reach import ReachableState, shown
from hotloop.values.rng import RngStates
from hotloop.values.tree import form_of

_DEVICE = "prim.device.default"  # a question that subclasses of Tensor make an operation of
_RECURRENCE, _DROPOUT_STATE = "aten._cudnn_rnn.default", "aten._cudnn_init_dropout_state.default"
MOST_LOOKS = 4  # at a step before it is captured; two where they agree
_FROZEN = "it draws random numbers on the host, which a capture would freeze"
_ALLOCATIONS = {f"aten.{name}" for name in ("empty.memory_format", "empty_like.default", "empty_strided.default")}
_OF_SEEDS = ("aten.random_.default", "aten._local_scalar_dense.default")


@dataclass
class Inspection:
    """Record of one forward pass: operations, synchronizations, random numbers."""

    work: list[tuple[Hashable, Site | None]] = field(default_factory=list)
    form: Hashable = None  # of the batch that it was over
    waits: Waits = field(default_factory=Waits)
    drew: bool = False  # random numbers on the host, which may decide something
    draws: HostDraws = field(default_factory=HostDraws)  # those that were seen
    effects: list[str] = field(default_factory=list)  # names of Python values that it changed
    carried: list[str] = field(default_factory=list)  # names of tensors that it read and replaced
    relied_on: list[Tensor] = field(default_factory=list)  # that it read and left where they are
    read: set[int] = field(default_factory=set)  # storages that its operations read
    held: list[Tensor] = field(default_factory=list)  # that PyTorch may free, though a capture writes to them

    def note_host(self, waited: Waits, *, is_explained: bool) -> None:
        """Note synchronizations, and whether the draws that were seen explain all changes of the host's rng states."""
        self.waits.add(waited)
        self.drew = self.drew or not is_explained

    def compare(self, before: ReachableState, after: ReachableState) -> None:
        """Note what the pass changed in Python, from two looks that hold tensors."""
        self.effects = before.changes(after, tensors=False)
        replaced = (name for name, tensor in before.tensors.items() if after.tensors.get(name) is not tensor)
        read = {name for name, tensor in before.tensors.items() if _storage(tensor) in self.read}
        self.carried = sorted({shown(name) for name in replaced if name in read})
        self.relied_on = [before.tensors[name] for name in read if after.tensors.get(name) is before.tensors[name]]
        self.read = set()


@contextmanager
def inspected(device: torch.device, seen: Inspection) -> Iterator[None]:
    """Record the operations of a forward pass with shapes and numbers, synchronizations and host random numbers."""
    with _on_host(device, seen), _Noting(seen):
        yield


@contextmanager
def host_noted(device: torch.device, seen: Inspection) -> Iterator[None]:
    """Record what a forward pass does on the host: synchronizations and random numbers."""
    with _on_host(device, seen), _Seeing(seen.draws):
        yield


@contextmanager
def _on_host(device: torch.device, seen: Inspection) -> Iterator[None]:
    before, drawn = RngStates(device), len(seen.draws.made)
    with waits(device) as waited, made_on_device():
        yield
    seen.note_host(waited, is_explained=seen.draws.explain(drawn, before, RngStates(device)))


def host_objection(seen: Inspection, *, looks_at_masks: bool = True) -> str | None:
    """Why a step cannot be captured, from what a forward pass does on the host; None where it can.

    `looks_at_masks`: transformer layers will read masks in the captured step, too.
    """
    allowed = seen.waits.in_packages  # a package may do without in a capture; if not, that fails
    if len(seen.waits) > allowed + (0 if looks_at_masks else seen.waits.at_masks):
        return f"the host waits for the device: {seen.waits}"
    return _FROZEN if seen.drew else None


def objection(first: Inspection, second: Inspection, *, repeats_draws: bool = True) -> str | None:
    """Why a step cannot be captured once and replayed, from two forward passes; None where it can."""
    on_host = host_objection(first) or host_objection(second)
    return on_host or difference(first, second, repeats_draws=repeats_draws)


def difference(first: Inspection, second: Inspection, *, repeats_draws: bool = True) -> str | None:
    """The same, for what two passes have computed, drawn for nothing and changed."""
    drawn = first.draws.made, second.draws.made
    if drawn[0] != drawn[1] or (any(drawn) and not repeats_draws):
        return _FROZEN
    by_design = first.waits.in_packages and second.waits.in_packages  # it branches on data, and in a capture it cannot
    if not by_design and (where := departure(first, second)):
        return f"it does other work in each step, which a capture would freeze: {where}"
    for seen in (first, second):
        if seen.effects:
            return f"it changes {shorten(seen.effects, 3)} in Python, which a replay of a CUDA graph leaves out"
        if seen.carried:
            names = shorten(seen.carried, 3)
            return f"it reads {names} and puts a new tensor there; a replay reads the old one: write into it (copy_)"
    return None


def departure(first: Inspection, second: Inspection) -> str | None:
    """The first operation in which two passes differ; None where they are the same.

    Over batches of two forms they may differ: a kernel may need padding for one length and not for another.
    """
    if first.form != second.form:
        return None
    for (a, site), (b, _) in zip(first.work, second.work, strict=False):
        if a != b:
            return str(site or "outside your own code")
    if len(first.work) != len(second.work):
        longer = max(first.work, second.work, key=len)
        return str(longer[min(len(first.work), len(second.work))][1] or "outside your own code")
    return None


class Looks:
    """Inspections of ordinary passes, until the last two decide whether a step can be captured and replayed.

    A synchronization or a draw on the host that one of two looks has, and the other has not, may be the preparation of
    a library: cuDNN waits in its first call with a new dropout state, as after each restored rng state. Where both ran
    the same operations, it is no reason before another look has it too.

    `repeats_draws`: with each replay the host draws the numbers that decide nothing.
    """

    def __init__(self, *, repeats_draws: bool = True) -> None:
        self.made: list[Inspection] = []
        self._repeats_draws = repeats_draws

    @property
    def latest(self) -> Sequence[Inspection]:
        """Those that decide."""
        return self.made[-2:]

    @property
    def draws(self) -> Sequence[Draw]:
        """Random numbers drawn on the host that decide nothing, repeated for the rng state."""
        return self.made[-1].draws.made if self.made else ()

    @property
    def are_enough(self) -> bool:
        """Whether no further look is needed."""
        if len(self.made) < 2 or len(self.made) == MOST_LOOKS:
            return bool(self.made[1:])
        in_all = len({host_objection(seen) is None for seen in self.latest}) == 1
        return in_all or difference(*self.latest, repeats_draws=self._repeats_draws) is not None

    def objection(self) -> str | None:
        """Why the step cannot be captured; None where it can."""
        return objection(*self.latest, repeats_draws=self._repeats_draws)


@contextmanager
def operations_of(seen: Inspection) -> Iterator[None]:
    """Record the operations of a pass alone, as during a capture."""
    with made_on_device(), _Noting(seen):
        yield
    seen.read = set()


class _Seeing(DispatchMode):
    """Dispatch mode that sees operations before they run, and separately those on host random numbers."""

    def __init__(self, draws: HostDraws) -> None:
        super().__init__()
        self.draws = draws

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.draws.concern(func, args, kwargs):
            result = func(*args, **kwargs)
            self.draws.note(func, args, result)
            return result
        self.see(func, args, kwargs)
        return func(*args, **kwargs)

    def see(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Called before an operation runs."""


class Comparison(_Seeing):
    """Compares operations with those of inspected passes as they run, at a fraction of the cost."""

    def __init__(self, *captured: Inspection) -> None:
        super().__init__(HostDraws())
        self._expected = iter([each for seen in captured for each in seen.work])
        self._where: str | None = None

    def departure(self) -> str | None:
        """The first operation that differed; None where all are the same."""
        if self._where is None and self.draws.matter:
            self._where = "random numbers of the host decide something"
        if self._where is None and (missing := next(self._expected, None)) is not None:
            self._where = str(missing[1] or "outside your own code")
        return self._where

    def see(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self._where is None and not _is_preparation(func, args):
            expected, _ = next(self._expected, (None, None))
            if expected != _call(func, args, kwargs):
                self._where = str(user_site() or "outside your own code")


class _Noting(_Seeing):
    """Notes each operation with its shapes, its numbers and the line that asked for it."""

    def __init__(self, seen: Inspection) -> None:
        super().__init__(seen.draws)
        self._work, self._read, self._held = seen.work, seen.read, seen.held

    def see(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if not _is_preparation(func, args):
            self._work.append((_call(func, args, kwargs), user_site()))
        if name_of(func) == _RECURRENCE and isinstance(args[-1], Tensor):
            self._held.append(args[-1])  # the state of its dropout, of which PyTorch makes a new one now and then
        self._read.update(_storage(each) for each in values_of(args, kwargs) if isinstance(each, Tensor))


def _is_preparation(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether an operation allocates memory, or prepares the dropout of a recurrent layer.

    What is written into new memory is an operation of its own, with its shapes; a library allocates when it needs to.
    cuDNN has a rng state of its own. PyTorch makes it anew, with a seed that it draws, in the first pass after the
    state of the device's generator was set; that a pass does so says nothing about the step.
    """
    name = name_of(func)
    if name in _OF_SEEDS:
        return isinstance(args[0], Tensor) and args[0].dim() == 0 and args[0].dtype == torch.int64
    return name in (_DROPOUT_STATE, _DEVICE) or name in _ALLOCATIONS


def _call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """The part of an operation that a capture would freeze."""
    return func, tuple(map(_trait, args)), tuple((k, _trait(v)) for k, v in kwargs.items())


def _storage(tensor: Tensor) -> int:
    """An id of a tensor's storage."""
    return storage_id(tensor.untyped_storage()) if tensor.layout == torch.strided else id(tensor)


def _trait(value: Any) -> Hashable:
    """The part of an argument that a capture would freeze: the shapes of tensors, the values of numbers."""
    return form_of(value, _trait_of_leaf, lambda part: not isinstance(part, list | tuple))


def _trait_of_leaf(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        known = str(value.flatten().tolist()) if is_few(value) else None  # as words, in which NaN equals itself
        return tuple(value.shape), value.dtype, value.device, known
    if isinstance(value, float | complex):
        return str(value)
    return value if isinstance(value, int | str | bool | torch.dtype | torch.Size | None) else str(type(value))


def signature(batch: Any) -> Hashable | None:
    """The part of a batch that a capture freezes: the shapes of tensors, the values of everything else.

    None where the batch holds something that cannot be compared.

    >>> signature((torch.zeros(2, 3), 1)) == signature((torch.ones(2, 3), 1))
    True
    >>> signature((torch.zeros(2, 3), 1)) == signature((torch.zeros(2, 3), 2))
    False
    """
    try:
        traits = form_of(batch, _form_of_leaf, _is_opaque)
        hash(traits)
    except (TypeError, RuntimeError):  # a subclass of Tensor may refuse to tell
        return None
    return traits


def _is_opaque(value: Any) -> bool:
    return not isinstance(value, list | tuple | Mapping) or (isinstance(value, Mapping) and hasattr(value, "to"))


def _form_of_leaf(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if not has_strides(value):  # how much memory it takes depends on its values
            raise TypeError(str(value.layout))
        return tuple(value.shape), value.dtype, value.stride()
    if hasattr(value, "__dict__"):
        raise TypeError(type(value).__name__)
    return value  # type: ignore[no-any-return]
