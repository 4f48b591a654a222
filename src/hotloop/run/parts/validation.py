"""The evaluation after each epoch."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from hotloop._torch import keeps_workers
from hotloop.data import Position, Stream
from hotloop.data.loader_rng import loader_rng_restorer
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
    position: Saved[dict[str, Any] | None] = None  # of its loader, between two evaluations

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._loader, self._metrics, self._predict = asked.validate, asked.metrics, asked.predict
        self._stream: Stream[Any] | None = None

    @property
    def _batches(self) -> Stream[Any]:
        """The stream of the loader; persistent workers that were there before it are used, and their state unknown."""
        if self._stream is None or not self._stream.is_current:
            assert self._loader is not None
            is_begun = isinstance(self._loader, DataLoader) and keeps_workers(self._loader)
            self._stream = Stream(self._loader, self.run.loop.device, origins=not is_begun)
        return self._stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close(persistent=True)

    def evaluate(self, epoch: Epoch) -> Epoch:
        return replace(epoch, metrics=self.run.loop.evaluate(self._batches, self._metrics, predict=self._predict))

    def state_dict(self) -> dict[str, Any]:
        self.position = self._batches.position().state_dict()
        return super().state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        if state.get("position") is not None:
            Position.from_state_dict(state["position"])

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        undo.callback(loader_rng_restorer(self._loader))
        super().load(state, undo)
        if self.position is not None:
            why = self._batches.resume(Position.from_state_dict(self.position)).reason
            self.differs = why and f"in the evaluations, {why}"
        elif state.get("draws") is not None:  # where older versions of hotloop kept it
            self.differs = "the checkpoint is of an older hotloop: the evaluations draw anew"
