"""`TunedRun`: a run as the tuner sees it: its next step, and its plan, which is switched between two windows."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from hotloop.data import Stream
from hotloop.levers import Lever, added_levers, rounding_levers, without
from hotloop.plan import Plan
from hotloop.step.compilation import CompiledObjective
from hotloop.step.retry import OutOfMemory
from hotloop.step.training import TrainingStep
from hotloop.tune.first_steps import Reaching
from hotloop.tune.subject import Subject
from hotloop.tune.tuning_record import TuningRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Ahead:
    """The next step, or several in one CUDA graph."""

    loader: Any  # None where the batch was handed to `step`, and no loader gave it
    transform: Any
    batch: Any  # None where several steps go into one graph
    batches: int
    stream: Stream[Any] | None  # the source of the batches
    left: int | None  # batches of the run that are still to come, these included; None where nobody knows
    is_between_windows: bool
    can_be_several: bool  # whether the data lives on the device and `fit` owns the loop
    sample: Callable[[], Any]  # a batch like those of the stretch, taken without a trace

    @property
    def example(self) -> Any:
        """A batch of the run to try something on."""
        return self.sample() if self.batch is None else self.batch


Steps = Generator[float, Ahead, T]  # lets steps pass: yields how many batches may, before it is asked again


class Agreeing(Protocol):
    """The ranks of a run, which tune together: a timing or an obstacle of one holds for all."""

    size: int

    def largest(self, number: float) -> float:
        """The maximum over all ranks."""

    def reason(self, words: str | None) -> str | None:
        """The first reason that a rank has; None where none has one."""

    def from_first(self, value: Any) -> Any:
        """The value of rank 0, plain data."""


class Compared(Protocol):
    """The part of a loop that the gate uses."""

    memory: OutOfMemory

    @property
    def step(self) -> TrainingStep:
        """The step in use."""

    def as_written(self) -> AbstractContextManager[TrainingStep]:
        """The step as the person wrote it, in fp32, for a pass or two."""

    def trying(self, plan: Plan) -> AbstractContextManager[TrainingStep]:
        """The step of another plan, for a pass or two."""


class Tuned(Compared, Reaching, Protocol):
    """The part of a loop that the tuner uses."""

    by_hand: bool  # whether the plan that is carried out is the person's

    @property
    def ranks(self) -> Agreeing:
        """The ranks that tune with this one."""

    def carry_out(self, plan: Plan, why: str, compiled: dict[str, CompiledObjective] | None = None) -> None:
        """Switch to another plan, with objectives that are compiled already where given."""

    def unplanned(self) -> AbstractContextManager[None]:
        """The model and the optimizers with the levers of the plan reverted."""


class TunedRun:
    """The next step of a run, and its plan."""

    def __init__(self, subject: Subject, loop: Tuned, record: TuningRecord) -> None:
        self.subject, self.loop = subject, loop
        self.batches = 0  # trained on so far
        self._record = record
        self._ahead: Ahead | None = None

    def before(self, ahead: Ahead, batches: int) -> None:
        """Note the next step, which comes after so many batches."""
        self._ahead, self.batches = ahead, batches

    @property
    def next(self) -> Ahead:
        """The next step."""
        assert self._ahead is not None
        return self._ahead

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.loop.step.plan

    @property
    def plain_plan(self) -> Plan:
        """The person's plan with the present stream and workers."""
        return self.with_present_data(self.subject.plan)

    def rounding(self) -> Sequence[Lever]:
        """Levers that round losses and gradients, which the tuner and not the person has pulled."""
        return () if self.loop.by_hand else rounding_levers(self.plan, self.plain_plan)

    def with_present_data(self, plan: Plan) -> Plan:
        """A plan with the present stream and workers, and without levers dropped since it was made."""
        now, dropped = self.plan, self._record.dropped
        gone = [lever for lever in added_levers(plan, self.subject.plan) if lever.name in dropped]
        return replace(without(gone, plan), stream=now.stream, pinned=now.pinned, workers=now.workers)

    def window(self) -> Steps[Ahead]:
        """Let steps pass up to the end of an accumulation window."""
        while not self.next.is_between_windows:
            yield 0
        return self.next

    def switch(self, plan: Plan, why: str) -> Steps[None]:
        """Switch to a plan at the end of a window; stream and workers stay those of now."""
        yield from self.window()
        self.loop.carry_out(self.with_present_data(plan), why)
