"""The state of the loop itself, which outlives a run: weights, optimizers, schedulers, counts, plan, losses."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

from hotloop.printing.text import shorten
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.run.state import LoopState, is_shaped


class SavedLoop(Part):
    """Saves and loads the `LoopState`."""

    name = "loop"

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._saver = asked.saver

    @cached_property
    def _loop(self) -> LoopState:
        """Made before training, since states are compared with what the script has built."""
        return LoopState(self.run.core)

    def begin(self) -> None:
        if self._saver is not None:
            loop = self._loop
            if is_shaped(self.run.core):
                self._saver.check({"loop": loop.state_dict()})

    def state_dict(self) -> dict[str, Any]:
        state = self._loop.state_dict()
        return state | {"watch": self.run.core.ranks.watch_of_all(state["watch"])}

    def check(self, state: Mapping[str, Any]) -> None:
        self._loop.check(state)

    def before_load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        undo.callback(partial(vars(self.run).update, dict(vars(self.run))))

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        if kept := self._loop.settings_kept(state):
            self.says = f"the optimizer keeps the settings of the checkpoint: {shorten(kept, 3)}"
        self._loop.load(state, undo)

    def load_weights(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        self._loop.load_weights(state, undo)
        if missing := self._loop.missing:
            self.differs = f"the checkpoint and this run differ in: {shorten(missing, 6)}"

    def after_load(self, state: Mapping[str, Any]) -> None:
        self._loop.after_load(state)
