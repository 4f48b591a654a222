"""A look at a loop: where the memory and the time of real steps go, which are all undone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from hotloop.data.samplers import generators_of
from hotloop.memory.tracking import Track, track
from hotloop.memory.usage import Holdings, Usage, holdings, usage
from hotloop.plan import Plan
from hotloop.profiling.profiler import Profiler
from hotloop.profiling.record import Profile
from hotloop.records import Record
from hotloop.step.training import TrainingStep
from hotloop.tune.rehearsal import rehearsing
from hotloop.tune.subject import Subject


@dataclass(frozen=True)
class Memory(Record):
    """What a loop holds and uses."""

    usage: Usage  # of the device: allocated, reserved, this process, free
    holdings: Holdings  # of the model and its optimizers: parameters, gradients, optimizer state
    step: Track | None = None  # a step: its peak by phase and module, and over time; None where none was looked at

    def __str__(self) -> str:
        lines = [str(self.usage), str(self.holdings)]
        return "\n".join(lines if self.step is None else [*lines, str(self.step)])


def memory_of(subject: Subject, plan: Plan, batch: Any = None) -> Memory:
    """What is held now; with a batch also what a step of it takes."""
    now, held = usage(subject.device), holdings(subject.model, subject.optimizers)
    return Memory(now, held, None if batch is None else _tracked(subject, plan, batch))


def _tracked(subject: Subject, plan: Plan, batch: Any) -> Track:
    """A step that is looked at operation by operation."""
    plain = replace(plan, compile="off", graph=0, channels_last=False, stream="direct", accumulate=1)
    with rehearsing(subject) as rehearsal, rehearsal.step(plain) as step:
        step(batch)  # in which the optimizers allocate what they keep
        with track(subject.model, subject.device) as seen:
            step(batch)
        return seen.record()


def profile_of(
    subject: Subject,
    step: TrainingStep,
    batches: Iterable[Any],
    steps: int,
    loader: object,
    tell: Callable[[str], None],
) -> Profile:
    """Where the time of steps goes on these batches of a loader, which are read again and again."""
    with rehearsing(subject, generators_of(loader)) as rehearsal:
        rehearsal.exchange(step)
        with Profiler(subject.device, steps=steps, name=type(subject.model).__name__, tell=tell) as profiler:
            while not profiler.done:
                for batch in batches:
                    step(batch)
                    profiler.step()
                    if profiler.done:
                        break
    return profiler.profile
