"""Where a run is in its data."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from hotloop.data import Position
from hotloop.data.loader_rng import loader_rng_restorer
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.values.saved import Count, Saved


class Data(Part):
    """Ends the workers of the loader, and brings it to where a checkpoint has left it."""

    name = "data"
    after = ("loop",)
    epoch: Saved[Count]  # epochs that are done
    batches: Saved[Count | None]  # of the next one; None between two epochs
    position: Saved[dict[str, Any]]

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._loader = asked.loader

    def close(self) -> None:
        self.run.core.data.rest()

    def end_epoch(self, whole: bool) -> None:
        if whole and self.run.epoch + 1 == self.run.epochs:
            self.run.core.data.end_workers()  # which takes a while, in which a GPU is still busy

    def finish(self) -> None:
        self.run.core.data.rest()  # while the death of workers is not told everywhere

    def state_dict(self) -> dict[str, Any]:
        run, stream = self.run, self.run.core.data.stream
        assert stream is not None
        self.epoch, self.batches = run.epoch, None if run.is_between else run.batches
        self.position = stream.position(self.batches).state_dict()
        return super().state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        Position.from_state_dict(state["position"])

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        super().load(state, undo)
        undo.callback(loader_rng_restorer(self._loader))
        run = self.run
        run.resume_at(self.epoch, self.batches)
        where = Position.from_state_dict(self.position)
        self.differs = run.core.data.resume(
            self._loader, where, undo, lambda done, every: run.say(f"batch {done} of {every}")
        )
