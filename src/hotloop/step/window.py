"""`Window`: the batches since the last update and their weights."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from hotloop._torch import foreach_div_
from hotloop.memory.oom import surely
from hotloop.objective.objectives import Losses
from hotloop.records import Record
from hotloop.step.sharding import local_shard
from hotloop.values.saved import Amount, Count, Positive


@dataclass(frozen=True)
class AgreedWeights(Record):
    """How ranks weigh losses, as the batches of the first windows have shown.

    It is in checkpoints: a resumed run begins with other batches, and weights in another unit would round otherwise.
    """

    ranks: Positive = 1
    windows: Count = 0  # in which ranks have agreed
    unit: Annotated[float, lambda unit: 0 < unit < math.inf] = 1.0  # in which all of them count weights
    ratio: Amount | None = None  # what an item weighs, where that is the same in the batches of all ranks
    on_device: bool = False  # whether weights are added up there
    is_sum: bool = False  # whether losses are sums, which have no weights


@dataclass(slots=True)
class Window:
    """The batches of one objective since its last update.

    Accumulation equals the full batch: each batch weighs as much as its loss is the mean over, and the gradient is
    divided by the sum of weights, so that an uneven last batch or a short last window counts as much as it should.
    """

    batches: int = 0
    unit: int | float = 1  # in which weights are counted: about what the first batch or micro-batch weighs
    weight: float | Tensor = 0.0  # of all of them, in that unit
    is_weighed: bool = False  # whether it holds the gradients of several batches or micro-batches, by their weights

    def copy(self) -> "Window":
        """A copy; `dataclasses.replace` takes as long as an operation."""
        return Window(self.batches, self.unit, self.weight, self.is_weighed)

    def weighed(
        self, losses: Losses, captured: Tensor | None = None, unit: Callable[[Losses], float] | None = None
    ) -> Tensor | None:
        """The loss times its weight in the window; None where it is the mean of nothing, which is NaN.

        `captured`: in a capture, the tensor that carries the sum of weights from one graph to the next.
        `unit` gives the unit where that is not the first batch's own.
        """
        if losses.is_sum:
            return losses.total
        if losses.first is not None and self.batches and unit is None:  # the gradient stays as it is
            counted, self.is_weighed = float(self.weight) if self.is_weighed else 1.0, True
            is_there = bool(losses.first and counted)
            self.unit, self.weight = (losses.first / counted, counted) if is_there else (losses.unit, 0.0)
        is_first = not self.is_weighed
        if is_first:
            self.unit, self.is_weighed = losses.unit if unit is None else unit(losses), True
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

    def average(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Divide the gradients by the sum of weights."""
        gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
        weight = self.weight
        if not self.is_weighed or not gradients or (isinstance(weight, float) and weight in (0.0, 1.0)):
            return
        if isinstance(weight, Tensor):  # where nothing counted, all gradients are 0
            weight = surely(partial(_not_zero, weight), device)
        surely(partial(foreach_div_, gradients, weight), device)


def _not_zero(weight: Tensor) -> Tensor:
    return torch.where(weight == 0, 1.0, weight)
