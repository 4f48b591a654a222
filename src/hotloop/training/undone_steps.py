"""Memory and time of a loop's real steps, all undone afterwards."""

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hotloop.data.loader_rng import is_stateful
from hotloop.data.samplers import generators_of
from hotloop.errors import PlanWarning
from hotloop.memory.usage import Holdings, Usage, holdings, usage
from hotloop.plan import Plan
from hotloop.printing.text import shorten, size
from hotloop.profiling.operation_log import OperationLog
from hotloop.profiling.profile_record import CATEGORIES, MemorySample, Profile
from hotloop.profiling.profiler import Profiler
from hotloop.records import Record
from hotloop.step.training import TrainingStep
from hotloop.training.changes import makers_of, owner_of
from hotloop.training.state import loader_rng_restorer
from hotloop.tune.rehearsal import Rehearsal, rehearsing, written_tensors
from hotloop.tune.subject import Subject
from hotloop.values.effects import look
from hotloop.values.rng import generators_in
from hotloop.values.snapshot import Snapshot


@dataclass(frozen=True)
class Memory(Record):
    """Memory that a loop holds and uses."""

    usage: Usage  # of the device: allocated, reserved, this process, free
    holdings: Holdings  # of the model and its optimizers: parameters, gradients, optimizer state
    step: tuple[MemorySample, ...] = ()  # what was alive over a step; empty where none was looked at

    @property
    def peak(self) -> MemorySample | None:
        """The highest moment of the step."""
        return max(self.step, key=lambda sample: sample.total, default=None)

    def __str__(self) -> str:
        lines = [str(self.usage), str(self.holdings)]
        if (top := self.peak) is not None:
            held = ", ".join(f"{name} {size(getattr(top, name))}" for name in CATEGORIES)
            lines.append(f"peak of a step {size(top.total)} in {top.phase or 'its beginning'} ({held})")
        return "\n".join(lines)


@contextmanager
def undone(
    subject: Subject,
    loaders: Mapping[str, object],
    transform: object = None,
    others: Sequence[Any] = (),
    known: Iterable[object] = (),
    batch: object = None,
) -> Iterator[Rehearsal]:
    """A rehearsal that restores every object it changes, and warns with the names of those it cannot restore.

    The keys of `loaders` come before the names of their parts. Of `others`, such as hooks, the attributes are restored
    and the state that they tell, and nobody looks further. What is `known` is not looked at.
    """
    handed = {"device_transform": transform}
    for prefix, loader in loaders.items():
        handed |= makers_of(loader, prefix) if isinstance(loader, DataLoader) else {f"{prefix}loader": loader}
    things = (*(each.objective for each in subject.objectives), *handed.values(), *others)
    owners = [getattr(thing, "__self__", owner_of(thing)) for thing in things]
    inner = dict.fromkeys(module for outer in subject.modules for module in outer.modules())
    parts = (part for owner in owners for part in (owner, *_attributes(owner).values()))
    held = [part for part in parts if isinstance(part, nn.Module) and part not in inner]  # such as an AveragedModel
    subject = replace(subject, modules=[*subject.modules, *held])
    roots, skip, known = subject.roots(handed, batch), subject.restorable(), [*known, *written_tensors(subject)]
    before = look(roots, skip, known)
    generators = [*before.generators.values(), *generators_in([*inner, *owners])]
    generators += (generator for loader in loaders.values() for generator in generators_of(loader))
    kept = Snapshot().items(vars(optimizer) for optimizer in subject.optimizers)
    kept.items(container for owner in (*inner, *owners) for container in _containers_of(owner))
    told = [thing for thing in others if is_stateful(thing) and not isinstance(thing, type)]
    states = [(thing, copy.deepcopy(thing.state_dict())) for thing in told]
    rng_restorers = [loader_rng_restorer(loader) for loader in loaders.values()]
    try:
        with rehearsing(subject, generators) as rehearsal:
            yield rehearsal
    finally:
        kept.restore()
        for thing, state in states:
            thing.load_state_dict(state)
        for restore in rng_restorers:
            restore()
        if changed := before.changes(look(roots, skip, known)):
            words = f"real steps have changed {shorten(changed, 4)}, which cannot be restored"
            warnings.warn(words, PlanWarning, stacklevel=5)


def _attributes(owner: object) -> dict[str, Any]:
    held = None if isinstance(owner, ModuleType | type) else getattr(owner, "__dict__", None)
    return held if isinstance(held, dict) else {}


def _containers_of(owner: object) -> Iterator[Any]:
    """The containers of an object's attributes; not deeper ones, which may hold a million items of data."""
    held = _attributes(owner)
    # A mapping of another kind may be a file, such as one of h5py.
    return (each for each in (owner, held, *held.values()) if isinstance(each, list | dict | set | deque))


def memory_of(subject: Subject, plan: Plan, batch: Any = None) -> Memory:
    """Memory held now, and with a batch also that of a step."""
    now, held = usage(subject.device), holdings(subject.model, subject.optimizers)
    if batch is None:
        return Memory(now, held)
    plain = replace(plan, compile="off", graph=0, channels_last=False, stream="direct", accumulate=1)
    with undone(subject, {}, batch=batch) as rehearsal, rehearsal.step(plain) as step:
        step(batch)  # in which the optimizers allocate what they keep
        log = OperationLog(subject.device, lambda: subject.optimizers)
        with ExitStack() as undo:
            undo.callback(register_optimizer_step_pre_hook(log.begin_update).remove)
            undo.callback(register_optimizer_step_post_hook(log.end_update).remove)
            undo.enter_context(log.looking())
            step(batch)  # which is looked at operation by operation
        return Memory(now, held, log.memory.samples())


def profile_of(
    subject: Subject,
    step: TrainingStep,
    batches: Iterable[Any],
    steps: int,
    loader: object,
    tell: Callable[[str], None],
    transform: object = None,
) -> Profile:
    """The profile of steps on these batches, which are read repeatedly."""
    with undone(subject, {"": loader}, transform) as rehearsal:
        rehearsal.exchange(step)
        with Profiler(subject.device, steps=steps, name=type(subject.model).__name__, tell=tell) as profiler:
            while not profiler.done:
                for batch in batches:
                    step(batch)
                    profiler.step()
                    if profiler.done:
                        break
    return profiler.profile
