"""Checkpoints of a run: when it is saved, and how it goes on from one."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.errors import HotloopError
from hotloop.printing.text import printable
from hotloop.records import Epoch
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part, Parts
from hotloop.values.saved import Count, Saved, all_or_nothing


class Checkpoints(Part):
    """Saves the states of all parts by a `Saver`, and loads them."""

    name = "checkpoint"
    after = ("losses", "validation", "schedule", "best", "hooks", "python_state", "ranks", "report")
    resumed: Saved[Count] = 0  # times that the run went on from a checkpoint
    seconds: Saved[float] = 0.0  # for which training was held up in earlier parts of the run

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        assert asked.saver is not None
        self._saver, self._goal = asked.saver, asked.hooks.goal
        self._is_due = self._is_refused = False
        self._before: dict[str, Any] | None = None  # the state before an evaluation

    def see_all(self, parts: Parts) -> None:
        self.parts = parts

    def begin(self) -> None:
        if self.resumed:
            self._say_where_it_goes_on()

    def is_due(self) -> bool:
        self._is_due = self._saver.is_due(self.run.loop.steps)
        return self._is_due

    def between_windows(self, ends: bool) -> None:
        self._save(wait=ends)

    def before_evaluation(self) -> None:
        self._before = self.parts.state_dict()

    def epoch_done(self, epoch: Epoch) -> None:
        self._before = None

    def after_epoch(self) -> None:
        """Save where it is time, at the end of the run, and where the score is the best."""
        run = self.run
        if run.is_cut_short:
            return
        score = self._goal.score(run.history[-1]) if run.history else math.inf  # infinite where it was not evaluated
        is_best = score < math.inf and run.best is not None and run.best.epoch == run.history[-1].number
        is_last = run.must_end() or run.epoch >= run.epochs
        if is_last or is_best or run.core.ranks.any(self._is_due):
            self._save(None if score == math.inf else score, wait=is_last)

    def end(self) -> None:
        """Save the end where it is not yet: the evaluation was cut short, or the run was stopped between two epochs."""
        run, saver = self.run, self._saver
        if run.stop.twice and saver.writer.busy:
            run.say(f"still writing a checkpoint to {printable(str(saver.folder))}")
        saver.writer.wait()
        is_missing = run.stop.asked and run.is_between and saver.last != run.loop.steps
        is_missing = run.core.ranks.from_first(is_missing)  # which alone knows whether the last one was written
        if run.is_cut_short and self._before is not None:
            self._save(tree=self._before, wait=True)
        elif is_missing:
            self._save(wait=True)

    def report(self) -> Mapping[str, Any]:
        return {"resumed": self.resumed, "saved": self._saver.last, "saving": self.seconds + self._saver.stall}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seconds": self.seconds + self._saver.stall}

    def after_load(self, state: Mapping[str, Any]) -> None:
        self.resumed += 1

    def _save(self, score: float | None = None, *, tree: dict[str, Any] | None = None, wait: bool = False) -> None:
        self._saver.save(
            self.run.loop.steps, lambda: self._resumable(tree or self.parts.state_dict()), score, wait=wait
        )

    def _resumable(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The tree of a checkpoint: warn once where the script would refuse it. The first one is checked closely."""
        if self._is_refused:
            return tree
        try:
            with all_or_nothing():
                self.parts.check(tree)
        except HotloopError as error:
            self._is_refused = True
            if self.run.core.ranks.is_first:
                warnings.warn(
                    f"the script cannot resume from the checkpoint of step {self.run.loop.steps}: {error.what}\n  fix:"
                    " build everything in its final form before fit: buffers in their final shape, all layers, all"
                    " groups of an optimizer, which skips what has no gradient; keep settings that it would accept",
                    CheckpointWarning,
                    stacklevel=6,
                )
        return tree

    def _say_where_it_goes_on(self) -> None:
        run = self.run
        if run.epoch >= run.epochs and run.unevaluated is None:
            every = "the epoch was" if run.epochs == 1 else f"all {run.epochs} epochs were"
            run.say(f"{every} done at step {run.loop.steps}: nothing is left to train")
            return
        if run.stop.is_final:
            return  # the line of its end tells all
        place = f"after epoch {run.epoch} of {run.epochs}"
        if run.batches:
            every = "" if run.length is None else f" of {run.length}"
            place = f"in epoch {run.epoch + 1} of {run.epochs}, after batch {run.batches}{every}"
        run.say(f"resuming from step {run.loop.steps}, {place}")
        for words in filter(None, (part.says for part in self.parts.all)):
            run.say(words)
        if reasons := [part.differs for part in self.parts.all if part.differs]:
            why = "; ".join(reasons)
            warnings.warn(f"the run may differ from one that never stopped: {why}", CheckpointWarning, stacklevel=4)
