"""`Scored`: a criterion that accumulates metrics of the training outputs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument
from hotloop.metrics.evaluation import Metrics, check_metrics
from hotloop.objective.objectives import Criterion, compared, items_in
from hotloop.placement.host_copy import HostCopy


class Scored(nn.Module):
    """The same loss, with metrics of its outputs accumulated on the device, without another forward pass.

    The sums are buffers: a pass that is undone or repeated restores them, a CUDA graph writes to them, a checkpoint
    holds them.
    """

    totals: Tensor  # rows: sums, what they are divided by, and both once more for values that came alone

    def __init__(self, loss: Criterion, metrics: Metrics) -> None:
        super().__init__()
        self._call = compared(loss)
        if isinstance(loss, nn.Module):
            self.criterion = loss  # whose weights are saved and moved
        self._metrics = {name: _weighted(metric) for name, metric in metrics.items()}
        self.register_buffer("totals", torch.zeros(4, len(metrics), dtype=torch.float64), persistent=False)

    @classmethod
    def of(cls, loss: Criterion | None, metrics: Metrics | None, device: torch.device) -> "Scored | None":
        """The criterion with `train_metrics=`; None where there are none."""
        check_metrics(metrics)
        if not metrics:
            return None
        if loss is None:
            raise BadArgument(
                "train_metrics= without loss=, so that output and target are not known",
                fix="give loss=, a criterion; an objective of your own can return what it computes as further losses",
            )
        if stateful := [name for name, metric in metrics.items() if hasattr(metric, "compute")]:
            raise BadArgument(
                f"train_metrics with {stateful[0]!r}, an object that keeps its own sums",
                fix="give functions (output, target) → tensor, such as hotloop.metrics.accuracy; metrics= takes both",
            )
        scored = cls(loss, metrics)
        scored.totals = scored.totals.to(backend_of(device).widest_float)
        return scored.to(device)

    def forward(self, output: Any, target: Any) -> Tensor:
        with torch.no_grad():  # before the loss, whose reduction is what is noted last where calls are watched
            for number, metric in enumerate(self._metrics.values()):
                row, total, count = self._sum(number, metric(output, target), output, target)
                self.totals[row, number].add_(total)
                self.totals[row + 1, number].add_(count)
        return self._call(output, target)

    def _sum(self, number: int, value: Any, output: Any, target: Any) -> tuple[int, Tensor, int | Tensor]:
        """The sum and the divisor of a metric's result: values, their mean, or values and weights."""
        dtype = self.totals.dtype
        if isinstance(value, tuple):
            values, weights = value
            return 0, (values * weights).sum(dtype=dtype), weights.sum(dtype=dtype)
        value = torch.as_tensor(value, device=self.totals.device)
        if value.dim() and value.numel() != 1:
            return 0, value.sum(dtype=dtype), value.numel()
        items = items_in((output, target))
        if not value.dim():
            return 0, value.to(dtype) * items, items
        # One value of a metric that gave several before is not a mean. The device knows, for graphs and repeated steps.
        count = torch.where(self.totals[1, number] > 0, 1, items)
        return 2, value.sum(dtype=dtype) * count, count

    def begin_epoch(self) -> None:
        self.totals.zero_()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context of a step that adds nothing to the sums."""
        before = self.totals.clone()
        yield
        self.totals.copy_(before)

    def end_epoch(self) -> "EpochScores":
        """The sums of the epoch, perhaps still on the device."""
        return EpochScores(tuple(self._metrics), HostCopy([self.totals.clone()]))


def _weighted(metric: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The variant of a metric that returns values and weights where it has one: selecting values would synchronize."""
    weighted: Callable[[Any, Any], Any] = getattr(metric, "weighted", metric)
    return weighted


@dataclass(frozen=True)
class EpochScores:
    """Training metrics of an epoch."""

    names: tuple[str, ...] = ()
    totals: HostCopy | None = None

    def means(self, total: Callable[[list[float]], list[float]]) -> dict[str, float]:
        """The metrics, over the items of all ranks, whose sums `total` gives."""
        if self.totals is None:
            return {}
        sums = total(self.totals.numbers().tolist())
        means = {}
        for number, name in enumerate(self.names):
            summed, count, alone, times = sums[number :: len(self.names)]
            means[name] = (summed + alone) / (count + times) if count + times else math.nan
        return means
