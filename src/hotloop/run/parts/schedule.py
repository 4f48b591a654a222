"""Schedulers that watch a metric, or count epochs that were evaluated."""

from hotloop.records import Epoch
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part


class Scheduling(Part):
    """Advances the `Schedule` of the loop after an epoch; after updates its step does."""

    name = "schedule"
    after = ("validation",)

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._metrics = asked.metrics
        self.needs_epochs_now = run.core.schedule.watches_a_metric

    def epoch_done(self, epoch: Epoch) -> None:
        self.run.core.schedule.after_evaluation(epoch, self._metrics)
