"""`Window`: the batches since the last update, and `Aside`: gradients kept out of the way of a batch that may fail."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from hotloop.memory.oom import surely
from hotloop.objective import Losses


@dataclass(slots=True)
class Window:
    """The batches of one turn since its last update."""

    batches: int = 0
    first: int | float | Tensor = 1  # items in its first batch: the unit in which the others count
    weight: float | Tensor = 0.0  # the sum of the others' weights in that unit
    is_weighed: bool = False  # whether it holds the gradients of several batches or pieces, by their weights

    def weighed(self, losses: Losses, unit: int | None) -> Tensor | None:
        """A loss as much as it counts among the others; None where it is known to be the mean of nothing, as NaN is."""
        if not self.is_weighed:
            first = losses.count if unit is None or losses.is_counted else unit
            self.first = first.clamp_min(1) if isinstance(first, Tensor) else max(first, 1)
            self.is_weighed = True
        weight = losses.count / self.first
        self.weight = self.weight + weight
        return losses.total * weight if isinstance(weight, Tensor) or weight else None

    def divide(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Make the sum of the weighed gradients their mean."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients or (isinstance(self.weight, float) and self.weight == 0):
            return
        surely(partial(torch._foreach_div_, gradients, self.weight), device)


class Learner(Protocol):
    """What has gradients: a turn of a step, or the model of a person's own loop."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...


class Aside:
    """The gradients of a learner, out of the way of a batch that may fail.

    `empty`: there are none. `kept`: those that are there are zeros, and stay where they are, since a CUDA graph has
    their addresses.
    """

    def __init__(self, learner: Learner, *, empty: bool = False, kept: bool = False) -> None:
        self._learner, self._kept = learner, kept
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        if not empty and not kept:
            self._before = [(p, p.grad) for p in learner.parameters if p.grad is not None]
            for parameter, _ in self._before:
                parameter.grad = None

    def undo(self) -> None:
        """The batch failed and will be repeated: take its gradients back."""
        for parameter in self._learner.parameters:
            if parameter.grad is not None:
                if self._kept:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None

    def put(self) -> None:
        """The batch failed for good: the gradients are as they were."""
        self.undo()
        for parameter, before in self._before:
            parameter.grad = before

    def join(self) -> None:
        """The batch went well: add its gradients to those that were there."""
        if not self._before:
            return
        both = [(before, p.grad) for p, before in self._before if p.grad is not None]
        if any(before.is_sparse or new.is_sparse for before, new in both):
            self._before = [(p, before if p.grad is None else before + p.grad) for p, before in self._before]
        elif both:
            torch._foreach_add_([before for before, _ in both], [new for _, new in both])
        for parameter, total in self._before:
            parameter.grad = total
