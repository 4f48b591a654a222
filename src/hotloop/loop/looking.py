"""The memory of a loop: what is held now and, for a real step on copies of the weights, where it goes."""

from dataclasses import dataclass, replace
from typing import Any

from hotloop.loop.step import Step
from hotloop.loop.tuning import Subject
from hotloop.memory.tracking import Track, track
from hotloop.memory.usage import Holdings, Usage, holdings, usage
from hotloop.plan import Plan
from hotloop.records import Record
from hotloop.state import Randomness, State


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
    """A step that is looked at operation by operation; afterwards everything is as before."""
    origin, random = State.of(subject.modules, subject.optimizers), Randomness(subject.device)
    plain = replace(plan, compile="off", graph=0, channels_last=False, stream="direct", accumulate=1)
    step = Step(subject.model, subject.turns, plain, averages=subject.averages)
    origin.copy().put()
    step.rig.engage()
    try:
        step(batch)  # in which the optimizers allocate what they keep
        with track(subject.model, subject.device) as seen:
            step(batch)
        return seen.record()
    finally:
        step.rig.release()
        origin.put()
        random.put()
