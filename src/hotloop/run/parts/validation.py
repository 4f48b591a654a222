"""The evaluation after each epoch."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from hotloop.data.loader_rng import loader_rng_restorer
from hotloop.data.validation_loader import Validation
from hotloop.records import Epoch
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.values.saved import Saved


class Evaluating(Part):
    """Evaluates `validate`; its loader draws in a resumed run what it would have drawn."""

    name = "validation"
    after = ("losses",)
    needs_epochs_now = True
    may_be_new = True
    draws: Saved[dict[str, Any] | None] = None  # where its loader is, between two evaluations

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._given, self._metrics, self._predict = asked.validate, asked.metrics, asked.predict
        self._validation = Validation(asked.validate, run.loop.device, saved=asked.saver is not None)

    def close(self) -> None:
        self._validation.close()

    def evaluate(self, epoch: Epoch) -> Epoch:
        scores = self.run.loop.evaluate(self._validation.loader, self._metrics, predict=self._predict)
        return replace(epoch, metrics=scores)

    def state_dict(self) -> dict[str, Any]:
        self.run.unsaved.update(self._validation.changed_in_workers)
        self.draws = self._validation.state_dict()
        return super().state_dict()

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        undo.callback(loader_rng_restorer(self._given))
        super().load(state, undo)
        self.differs = self._validation.load_state_dict(self.draws)
