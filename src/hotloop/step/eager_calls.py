"""`EagerCalls`: the eager step as captures see it; `watching`: contexts around its objectives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import buffers_of, parameters_of
from hotloop.levers.applied import AppliedPlan
from hotloop.plan import Plan
from hotloop.step.eager import EagerStep, Parts, See
from hotloop.step.retry import OutOfMemory

Call = Callable[[Any, int | None], Parts]  # an eager step: (batch, size of micro-batches)


@dataclass(frozen=True)
class EagerCalls:
    """The step that is captured. `calls` are the eager steps with the levers of the plan, `run` all with OOM retry."""

    model: nn.Module
    eagers: Sequence[EagerStep]
    calls: Sequence[Call]
    run: Callable[[Any], Parts]
    levers: AppliedPlan
    memory: OutOfMemory | None
    see: See | None

    @property
    def plan(self) -> Plan:
        return self.levers.plan

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.plan.device)

    @cached_property
    def optimizers(self) -> list[Optimizer]:
        return [optimizer for eager in self.eagers for optimizer in eager.trained.optimizers]

    @property
    def is_compiled(self) -> bool:
        return self.plan.compile != "off"

    @property
    def limit(self) -> int | None:
        """The most items of a micro-batch."""
        return None if self.memory is None else self.memory.portion.limit

    def items_in(self, batch: Any) -> int:
        return self.eagers[0].weighing.items_in(batch)

    def size_of(self, batch: Any) -> int | None:
        """The size of micro-batches for a batch; None for the whole batch."""
        return None if self.memory is None else self.memory.portion.size_for(self.items_in(batch))

    def advance_schedules(self) -> None:
        """Advance schedules after an update that they have not seen."""
        for eager in self.eagers:
            eager.update.advance_schedules()

    @property
    def steps(self) -> int:
        """Updates so far."""
        return self.eagers[0].update.counts.steps

    def modules_and_tensors(self) -> tuple[list[nn.Module], list[Tensor]]:
        """The layers of the model and of a criterion that is a module, and their parameters and buffers."""
        roots = [self.model] if self.memory is None else self.memory.modules
        modules = [module for root in roots for module in root.modules()]
        tensors: list[Tensor | None] = []
        for module in modules:
            tensors += parameters_of(module).values()
            tensors += buffers_of(module).values()
        return modules, [tensor for tensor in tensors if tensor is not None]

    def roots(self) -> dict[str, object]:
        """Objects from which the step reaches Python state, by the names that a person knows."""
        several = len(self.eagers) > 1
        objectives = {e.trained.name if several else "objective": e.trained.objective for e in self.eagers}
        return {"model": self.model, **objectives}


@contextmanager
def watching(eagers: Sequence[EagerStep], context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Call the objectives, not compiled, inside a context that watches them."""
    with ExitStack() as stack:
        for eager in eagers:
            stack.enter_context(eager.watching(context))
        yield
