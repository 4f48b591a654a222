"""`Window`: the batches since the last update and their weights."""

import math
from collections.abc import Sequence
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
    captured: "CapturedWindow | None" = None  # while its batches are captured

    def copy(self) -> "Window":
        """A copy; `dataclasses.replace` takes as long as an operation."""
        return Window(self.batches, self.unit, self.weight, self.is_weighed, self.captured)

    def weighed(self, losses: Losses, unit: float | None = None) -> Tensor | None:
        """The loss times its weight in the window; None where it is the mean of nothing, which is NaN.

        `unit` is given where it is not the first batch's own.
        """
        if losses.is_sum:
            return losses.total
        if losses.first is not None and self.batches and unit is None:  # the gradient stays as it is
            counted, self.is_weighed = float(self.weight) if self.is_weighed else 1.0, True
            is_there = bool(losses.first and counted)
            self.unit, self.weight = (losses.first / counted, counted) if is_there else (losses.unit, 0.0)
        begins = not self.is_weighed
        if begins:
            self.unit, self.is_weighed = losses.unit if unit is None else unit, True
        weight = losses.mass / self.unit
        if not isinstance(weight, Tensor):
            self.weight = self.weight + weight
            return losses.total * weight if weight else None
        weight = weight.detach()
        total = None if self.captured is None else self.captured.total
        self.weight = self.weight + weight if total is None else (total.zero_() if begins else total).add_(weight)
        return losses.total * weight

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the gradients by the sum of weights."""
        gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
        weight = self.weight
        if not self.is_weighed or not gradients or (isinstance(weight, float) and weight in (0.0, 1.0)):
            return
        device = gradients[0].device
        if isinstance(weight, Tensor):  # where nothing counted, all gradients are 0
            weight = surely(partial(_not_zero, weight), device)
        surely(partial(foreach_div_, gradients, weight), device)


class CapturedWindow:
    """What the graphs of a window's first, middle and last batch share."""

    def __init__(self) -> None:
        self.total: Tensor | None = None  # of weights on the device, carried from one graph to the next
        self._one: Window | None = None  # after its first batch: what each adds on the host

    def prepare(self, losses: Losses) -> None:
        """Make the tensor of weights before any graph, since all of them use it."""
        if self.total is None and isinstance(losses.mass, Tensor):
            self.total = torch.zeros((), dtype=torch.float32, device=losses.mass.device)

    def note(self, window: Window) -> None:
        """Note a window after a captured batch."""
        if window.batches == 1:
            self._one = window.copy()

    def add_replayed(self, window: Window) -> None:
        """Count a batch of a window that a graph has trained on."""
        one = self._one or window
        window.unit, window.is_weighed = one.unit, one.is_weighed
        window.weight = one.weight if isinstance(one.weight, Tensor) else window.weight + one.weight
        window.batches += 1


def _not_zero(weight: Tensor) -> Tensor:
    return torch.where(weight == 0, 1.0, weight)
