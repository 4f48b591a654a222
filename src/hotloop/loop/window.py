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
    unit: int | float = 1  # in which weights are counted: about what the first batch or micro-batch weighs
    weight: float | Tensor = 0.0  # of all of them, in that unit
    is_weighed: bool = False  # whether it holds the gradients of several batches or micro-batches, by their weights

    def weighed(self, losses: Losses, captured: Tensor | None = None) -> Tensor | None:
        """A loss as much as it counts among the others; None where it is known to be the mean of nothing, as NaN is.

        `captured`: while a CUDA graph is captured, the tensor that holds the sum of weights from one graph to the next.
        """
        if losses.is_sum:
            return losses.total
        is_first = not self.is_weighed
        if is_first:
            self.unit, self.is_weighed = losses.unit, True
        weight = losses.mass / self.unit
        if not isinstance(weight, Tensor):
            self.weight = self.weight + weight
            return losses.total * weight if weight else None
        weight = weight.detach()
        if captured is None:
            self.weight = self.weight + weight
        else:
            self.weight = (captured.zero_() if is_first else captured).add_(weight)
        return losses.total * weight

    def divide(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Make the sum of the weighed gradients their mean."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        weight = self.weight
        if not gradients or (isinstance(weight, float) and weight == 0):
            return
        if isinstance(weight, Tensor):  # where nothing counted, all gradients are 0
            weight = surely(partial(_not_zero, weight), device)
        surely(partial(torch._foreach_div_, gradients, weight), device)


def _not_zero(weight: Tensor) -> Tensor:
    return torch.where(weight == 0, 1.0, weight)


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
