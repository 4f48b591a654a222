"""The state of the loop itself, which outlives a run: weights, optimizers, schedulers, counts, plan, losses."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from hotloop.printing.text import shorten
from hotloop.training.kernel import RunState
from hotloop.training.part import FitArguments, Part
from hotloop.training.state import (
    Form,
    check,
    check_format,
    is_shaped,
    kept_settings,
    load_progress,
    load_rng_states,
    load_tensors,
    state_of,
)
from hotloop.values.rng import RngStates


class LoopState(Part):
    """Saves and loads the core of the loop."""

    name = "loop"

    def __init__(self, run: RunState, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._form: Form | None = None  # what the script has built, which a checkpoint must fit
        self._is_read_back = False  # whether a checkpoint was checked as closely as can be

    def begin(self) -> None:
        core, saver = self.run.core, self.run.saver
        if saver is not None and is_shaped(core):
            saver.check({"loop": state_of(core)})
        self._form = self._form or Form.of(core)

    def state_dict(self) -> dict[str, Any]:
        core = self.run.core
        state = state_of(core)
        return state | {"watch": core.ranks.watch_of_all(state["watch"])}

    def check(self, state: Mapping[str, Any]) -> None:
        check_format(state)
        self._form = self._form or Form.of(self.run.core)
        check(self._form, dict(state), tries=not self._is_read_back)
        self._is_read_back = True

    def before_load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        undo.callback(RngStates(self.run.core.subject.device).restore)
        undo.callback(partial(vars(self.run).update, dict(vars(self.run))))

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        core = self.run.core
        if kept := kept_settings(core, state):
            self.says = f"the optimizer keeps the settings of the checkpoint: {shorten(kept, 3)}"
        load_progress(core, dict(state), undo)
        core.watch.load_state_dict(state["watch"])

    def load_weights(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        load_rng_states(self.run.core, dict(state))  # what is no state of a generator shows here
        if missing := load_tensors(self.run.core, dict(state), undo):
            self.differs = f"the checkpoint and this run differ in: {shorten(missing, 6)}"

    def after_load(self, state: Mapping[str, Any]) -> None:
        load_rng_states(self.run.core, dict(state))
