"""Memory and time of a loop's real steps, all undone afterwards."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotloop.memory.usage import Holdings, Usage, holdings, usage
from hotloop.plan import Plan
from hotloop.printing.text import size
from hotloop.profiling.operation_log import OperationLog
from hotloop.profiling.profile_record import CATEGORIES, MemorySample, Profile
from hotloop.profiling.profiler import Profiler
from hotloop.records import Record
from hotloop.step.training import TrainingStep
from hotloop.tune.scratch import scratch
from hotloop.tune.subject import Subject


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


def memory_of(subject: Subject, plan: Plan, batch: Any = None) -> Memory:
    """Memory held now, and with a batch also that of a step."""
    now, held = usage(subject.device), holdings(subject.model, subject.optimizers)
    if batch is None:
        return Memory(now, held)
    plain = replace(plan, compile="off", graph=0, channels_last=False, stream="direct", accumulate=1)
    with scratch(subject, {}, batch=batch) as space, space.eager_step(plain) as step:
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
    with scratch(subject, {"": loader}, transform) as space:
        space.exchange(step)
        with Profiler(subject.device, steps=steps, name=type(subject.model).__name__, tell=tell) as profiler:
            while not profiler.done:
                for batch in batches:
                    step(batch)
                    profiler.step()
                    if profiler.done:
                        break
    return profiler.profile
