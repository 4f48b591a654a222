"""The mean losses of epochs, which may reach the host when the next epoch has begun."""

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from hotloop.checkpoint.damage import unusable
from hotloop.device.clock import Clock
from hotloop.records import Epoch
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.run.watch import Ending
from hotloop.values.saved import Saved


class Trained(NamedTuple):
    """An epoch that was trained, whose losses may still be on the device."""

    number: int
    ending: Ending
    clock: Clock
    end: Any
    earlier: float  # seconds of it in an earlier part of the run
    whole: bool


class EpochRecords(Part):
    """Makes the records of epochs, and keeps them."""

    name = "losses"
    after = ("train_metrics",)
    seconds: Saved[float] = 0.0  # of the epoch in progress
    unevaluated: Saved[Epoch | None] = None
    history: Saved[np.ndarray[Any, Any]]  # the epochs as JSON: what is no tensor in a checkpoint does not grow

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        core = run.core
        self.needs_epochs_now = (
            not core.subject.backend.non_blocking or core.ranks.size > 1
        )  # ranks add up at one moment
        self._under_way: deque[Trained] = deque()
        self._earlier = 0.0  # seconds of the epoch in progress, in an earlier part of the run
        self._began = 0.0
        self._encoded: list[bytes] = []  # each epoch once, however often the run is saved

    def begin_epoch(self) -> None:
        self._clock, self._began = Clock(self.run.loop.device), time.perf_counter()

    def end_epoch(self, whole: bool) -> None:
        run = self.run
        if run.core.watch.items_seen:
            ending, end = run.core.watch.end_epoch(), self._clock.lap()
            self._under_way.append(Trained(run.epoch + 1, ending, self._clock, end, self._earlier, whole))
        if whole:
            self._earlier = 0.0

    def known_epochs(self, wait: bool) -> Sequence[tuple[Epoch, bool]]:
        found = []
        while self._under_way and (wait or self._under_way[0].ending.landed()):
            done = self._under_way.popleft()
            means, items = self.run.core.ranks.means(done.ending.means(), float(done.ending.items))
            seconds = done.clock.seconds(done.end) + done.earlier
            losses = means if len(means) > 1 else {}
            found.append((Epoch(done.number, sum(means.values()), items, seconds, losses, metrics={}), done.whole))
        return found

    def report(self) -> Mapping[str, Any]:
        return {"epochs": tuple(self.run.history)}

    def state_dict(self) -> dict[str, Any]:
        self.seconds = 0.0 if self.run.is_between else self._earlier + time.perf_counter() - self._began
        self.unevaluated = self.run.unevaluated
        self._encoded += (json.dumps(each.to_json()).encode() for each in self.run.history[len(self._encoded) :])
        self.history = np.frombuffer(b"[" + b",".join(self._encoded) + b"]", np.uint8)
        return super().state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        try:
            is_sound = all(epoch.is_sound(finite=False) for epoch in _epochs_in(state["history"]))
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            is_sound = False
        if not is_sound:
            raise unusable("losses.history is not what a run of this loop saves there")

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        super().load(state, undo)
        self._earlier = self.seconds
        self.run.unevaluated, self.run.history = self.unevaluated, _epochs_in(self.history)


def _epochs_in(history: np.ndarray[Any, Any]) -> list[Epoch]:
    return [Epoch.from_json(each) for each in json.loads(history.tobytes())]
