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
from hotloop.run.changes import Changes, RunObjects, Unsaved
from hotloop.run.checks import is_state_of_generator, require
from hotloop.run.core import Core
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.run.state import is_shaped, modules_of
from hotloop.values.rng import Rng
from hotloop.values.saved import Saved, load_objects


class PythonState(Part):
    """Saves what differs from the beginning of the run, by the `Changes` of the loop, and warns of the rest."""

    name = "python_state"
    after = ("data", "validation")
    lost: Saved[list[str]]  # names of what training changes and no checkpoint holds
    found: Saved[dict[str, Any]]  # states of objects with a state_dict
    generators: Saved[dict[str, tuple[str, Any]]]  # type and rng state, by the path on which each was reached

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._loader, self._validate, self._saver = asked.loader, asked.validate, asked.saver
        self._unsaved: Unsaved | None = None
        self.lost = []
        core = run.core
        makers = {**makers_of(asked.loader), **makers_of(asked.validate, "validation ")}
        others = {**_handed_to(core), "device_transform": asked.transform, **makers, **asked.hooks.handed()}
        known = [run.loop, core, run, self, asked.loader, asked.validate]
        handed = {name: thing for name, thing in others.items() if thing is not None}
        self._objects = RunObjects(modules_of(core), core.schedule.schedulers, handed, core.stateful, known)
        resumes = asked.saver is not None and asked.saver.found is not None
        if not resumes or core.changes is None:
            core.changes = Changes(self._objects, core.subject.device)
        else:  # those of the loop so far where the same loop resumes, as in a notebook
            core.changes.attributes.hand(self._objects)
        self._attributes, self._schedulers = core.changes.attributes, core.changes.schedulers

    def close(self) -> None:
        self._attributes.leave()

    def begin(self) -> None:
        if self._saver is not None and is_shaped(self.run.core):
            self._saver.check({"changes": self._state()})
        searched = {"sampler": samplers_in(self._loader), "validation sampler": samplers_in(self._validate)}
        extra = {name + ".sampler" * n: each for name, several in searched.items() for n, each in enumerate(several)}
        self._unsaved = Unsaved(self._objects, extra)

    def state_dict(self) -> dict[str, Any]:
        run = self.run
        if self._unsaved is not None:
            self._tell(self._unsaved.names(surely=run.stop.asked or run.epoch == run.epochs))
        return {"lost": list(self.lost), **self._state()}

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        self._attributes.check(state)
        self._schedulers.check(state)

    def before_load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        self._missing = load_objects(self._objects.with_state(), state["found"], undo)

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        undo.callback(setattr, self, "lost", self.lost)
        self.lost = list(state["lost"])
        self._load_generators(state["generators"], undo)
        self._schedulers.load(state, undo)

    def after_load(self, state: Mapping[str, Any]) -> None:
        self._missing += self._attributes.load_attributes(state)
        reasons = []
        if self._missing:
            reasons.append(f"the checkpoint and this run differ in: {shorten(self._missing, 6)}")
        if self.lost:
            reasons.append(f"training had changed state that no checkpoint holds: {shorten(self.lost, 6)}")
        self.differs = "; ".join(reasons) or None

    def _state(self) -> dict[str, Any]:
        generators = self._objects.generators.items()
        return {
            "found": {name: thing.state_dict() for name, thing in self._objects.with_state().items()},
            "generators": {path: (type(each).__name__, Rng.of(each).get_state()) for path, each in generators},
            **self._attributes.state_dict(),
            **self._schedulers.state_dict(),
        }

    def _load_generators(self, saved: Mapping[str, tuple[str, Any]], undo: ExitStack) -> None:
        self._objects.search()
        found = self._objects.generators
        for path, (kind, state) in saved.items():
            if path not in found or type(found[path]).__name__ != kind:
                self._missing.append(path)
                continue
            rng = Rng.of(found[path])
            now = rng.get_state()
            require(is_state_of_generator(now, state), f"python_state.generators[{path!r}]")
            undo.callback(rng.set_state, now)
            rng.set_state(state)

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


def _handed_to(core: Core) -> dict[str, object]:
    """What a loop was given that may hold state, by name: loss or objectives, optimizers."""
    objectives, optimizers = core.subject.objectives, core.subject.optimizers
    losses = {f"objective {each.name}" if len(objectives) > 1 else "objective": each.objective for each in objectives}
    named = {f"optimizer {n}" if len(optimizers) > 1 else "optimizer": each for n, each in enumerate(optimizers, 1)}
    return {**(losses if core.criterion is None else {"loss": core.criterion}), **named}


def samplers_in(loader: object) -> list[object]:
    """The samplers of a loader that are the person's own."""
    if not isinstance(loader, DataLoader) or has_known_sampler(loader):
        return []
    return list(samplers_of(loader))
