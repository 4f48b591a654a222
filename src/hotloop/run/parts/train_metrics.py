"""Metrics of the training outputs, which the criterion adds up in its buffers."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from hotloop.records import Epoch
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.run.scores import EpochScores


class TrainMetrics(Part):
    """Begins and ends the sums of each epoch."""

    name = "train_metrics"

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        assert asked.scored is not None
        self._scored = asked.scored
        self._before: Tensor | None = None  # the sums before a filler batch of this rank, which counts for nothing
        self._ended: deque[EpochScores] = deque()  # of epochs that are not known yet

    def begin_epoch(self) -> None:
        if not self.run.batches:
            self._scored.begin_epoch()

    def before_step(self, batches: int) -> None:
        core = self.run.core
        self._before = self._scored.totals.clone() if core.ranks.data.is_filler() else None

    def after_step(self, loss: Tensor | None, batches: int) -> None:
        if self._before is not None:
            self._scored.totals.copy_(self._before)

    def end_epoch(self, whole: bool) -> None:
        if self.run.core.watch.items_seen:
            self._ended.append(self._scored.end_epoch())

    def complete(self, epoch: Epoch) -> Epoch:
        return replace(epoch, train_metrics=self._ended.popleft().means(self.run.core.ranks.total))

    def state_dict(self) -> dict[str, Any]:
        self.run.core.ranks.reduce_to_first(self._scored.totals)
        return {}

    def after_load(self, state: Mapping[str, Any]) -> None:
        if not self.run.core.ranks.is_first:  # which has the sums of all
            self._scored.begin_epoch()
