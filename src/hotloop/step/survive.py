"""`survive_oom`: forward and backward passes for a loop of one's own that survive running out of memory."""

from typing import Any

import torch
from torch import Tensor, nn

from hotloop.memory.fragmentation import Fragmented
from hotloop.objective.objectives import Criterion, Objective, as_objective, averages
from hotloop.objective.weighing import Weighing
from hotloop.plan import Plan, Split
from hotloop.step.eager import Counts, EagerStep, Parts, total
from hotloop.step.retry import OomRetry, OutOfMemory
from hotloop.step.trained_objectives import TrainedObjective


class Backward:
    """Forward and backward pass of a batch, in micro-batches where it does not fit; made by `survive_oom`."""

    def __init__(self, model: nn.Module, objective: Objective, criterion: Criterion | None, split: Split) -> None:
        self._model, self._split = model, split
        self._modules = (model, *([criterion] if isinstance(criterion, nn.Module) else []))
        self._trained = TrainedObjective("loss", objective, (), self._modules)
        roots = {"model": model, "objective": objective}
        self._weighing = Weighing(split, sums=not averages(criterion), roots=lambda: roots)
        self._memory = OutOfMemory(self._modules, torch.device("cpu"))  # of the model's device, from its first batch on
        self._retry: OomRetry[Parts] | None = None

    @property
    def micro_batch(self) -> int | None:
        """The present size of micro-batches; None for whole batches."""
        return self._memory.portion.limit

    @property
    def failures(self) -> int:
        """How often memory ran out so far."""
        return self._memory.portion.failures

    @property
    def fragmented(self) -> Fragmented | None:
        """How fragmented memory was when expandable segments were turned on; None where they were not."""
        return self._memory.mended

    def __call__(self, batch: Any) -> Tensor:
        """Accumulate the gradient of the whole batch; returns its loss, detached."""
        device = next((p.device for p in self._trained.parameters), torch.device("cpu"))
        if self._retry is None or self._memory.device != device:  # the model has moved
            self._memory = OutOfMemory(self._modules, device)
            plan = Plan(str(device), split=self._split)
            step = EagerStep(
                self._model, self._trained, plan, self._weighing, Counts(), memory=self._memory, updates=False
            )
            self._retry = OomRetry(step, self._memory, self._weighing.items_in, step.undo)
        return total(self._retry(batch))


def survive_oom(
    model: nn.Module, loss: Criterion | None = None, *, objective: Objective | None = None, split: Split = "auto"
) -> Backward:
    """Forward and backward pass for a loop of your own that do not die when memory runs out.

    What is returned is called with a batch that is where the model is. When memory runs out, everything that the
    attempt changed is restored (gradients, rng states, buffers) and the batch is run again in micro-batches, with the
    gradient of the whole batch: a micro-batch weighs as much as its loss is the mean over (items, targets that are not
    ignored, a mask), or as an objective says that returns `(loss, weight)`. The first cut is compared with the whole
    batch; a loss that couples its samples, as contrastive ones do, is an error and not another gradient. `split` is
    that of a `Plan`: how a batch is cut, and what is accepted. The size that fits is remembered and grows back.
    Gradients that are there are added to.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> backward = survive_oom(model, nn.MSELoss())
    >>> for batch in [(torch.ones(4, 2), torch.ones(4, 1))]:
    ...     optimizer.zero_grad()
    ...     loss = backward(batch)
    ...     optimizer.step()
    >>> backward.failures, backward.micro_batch
    (0, None)
    """
    Plan("cpu", split=split)  # which refuses what is none
    return Backward(model, as_objective(loss, objective), loss, split)
