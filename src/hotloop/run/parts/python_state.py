"""The state of Python objects that training changes: what a checkpoint holds of it, and what it cannot."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch.utils.data import DataLoader

from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.data.origin import makers_of
from hotloop.data.samplers import has_known_sampler, samplers_of
from hotloop.printing.text import shorten
from hotloop.run.changes import Changes, Unsaved
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.run.state import handed_to, is_shaped, modules_of
from hotloop.values.saved import Saved


class PythonState(Part):
    """Saves what differs from the beginning of the run, by the `Changes` of the loop, and warns of the rest."""

    name = "python_state"
    after = ("data", "validation")
    lost: Saved[list[str]]  # names of what training changes and no checkpoint holds

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._loader, self._validate, self._saver = asked.loader, asked.validate, asked.saver
        self._unsaved: Unsaved | None = None
        self.lost = []
        core = run.core
        makers = {**makers_of(asked.loader), **makers_of(asked.validate, "validation ")}
        others = {**handed_to(core, asked.transform, makers), **asked.hooks.handed()}
        known = [run.loop, core, run, self, asked.loader, asked.validate]
        resumes = asked.saver is not None and asked.saver.found is not None
        if not resumes or core.changes is None:
            modules = modules_of(core)
            core.changes = Changes(modules, core.schedule.schedulers, others, core.stateful, core.subject.device, known)
        else:  # those of the loop so far where the same loop resumes, as in a notebook
            core.changes.hand(others, core.stateful, known)
        self._changes = core.changes

    def close(self) -> None:
        self._changes.leave()

    def begin(self) -> None:
        if self._saver is not None and is_shaped(self.run.core):
            self._saver.check({"changes": self._changes.state_dict()})
        searched = {"sampler": samplers_in(self._loader), "validation sampler": samplers_in(self._validate)}
        extra = {name + ".sampler" * n: each for name, several in searched.items() for n, each in enumerate(several)}
        self._unsaved = Unsaved(self._changes, extra)

    def state_dict(self) -> dict[str, Any]:
        run = self.run
        if self._unsaved is not None:
            self._tell(self._unsaved.names(surely=run.stop.asked or run.epoch == run.epochs))
        return super().state_dict() | self._changes.state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        self._changes.check(state)

    def before_load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        self._missing = self._changes.load_found(state, undo)

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        super().load(state, undo)
        self._missing += self._changes.load_generators(state, undo)
        self._changes.restore_settings(state, undo)

    def after_load(self, state: Mapping[str, Any]) -> None:
        self._missing += self._changes.load_attributes(state, self.run.core.subject.device)
        reasons = []
        if self._missing:
            reasons.append(f"the checkpoint and this run differ in: {shorten(self._missing, 6)}")
        if self.lost:
            reasons.append(f"training had changed state that no checkpoint holds: {shorten(self.lost, 6)}")
        self.differs = "; ".join(reasons) or None

    def _tell(self, found: Iterable[str]) -> None:
        """Warn once for each name of state that training changes and no checkpoint holds."""
        names = {*found, *self.run.unsaved}
        if new := sorted(names - set(self.lost)):
            self.lost = sorted(names | set(self.lost))
            warnings.warn(
                f"training changes state that no checkpoint holds, so a resumed run starts without it:"
                f" {shorten(new, 6)}\n  fix: give it state_dict and load_state_dict and pass it:"
                " Loop(…, stateful={…}); or keep it as a buffer or a plain attribute of a module",
                CheckpointWarning,
                stacklevel=6,
            )


def samplers_in(loader: object) -> list[object]:
    """The samplers of a loader that are the person's own."""
    if not isinstance(loader, DataLoader) or has_known_sampler(loader):
        return []
    return list(samplers_of(loader))
