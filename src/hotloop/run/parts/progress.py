"""What a person sees of a run while it trains, and its last words."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from hotloop.records import Epoch
from hotloop.run.display import display_of
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.run.stop import ending_words


class Progress(Part):
    """Shows the run by a `Display`."""

    name = "progress"
    after = ("signals",)

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._show, self._saver = asked.progress, asked.saver
        if self._show is False:  # as on ranks other than the first
            self.idle = ("after_step",)

    @contextmanager
    def around(self) -> Iterator[None]:
        run = self.run
        done = run.epoch * (run.length or 0) + run.batches
        with (
            display_of(run.epochs, run.length, self._show, done=done) as self._display,
            run.core.tuner.record.saying(self._display.say),
        ):
            run.say = self._display.say
            yield

    def after_step(self, loss: Tensor | None, batches: int) -> None:
        run = self.run
        self._display.stretch(batches, run.epoch + 1, run.core.watch.latest, run.rate)

    def epoch_known(self, epoch: Epoch) -> None:
        self._display.epoch(epoch)

    def finish(self) -> None:
        """Say why the run ended early, what was saved, and how to resume."""
        run = self.run
        if not run.stop.asked or run.is_complete:
            return
        place = f"step {run.loop.steps:,}, epoch {min(run.epoch + 1, run.epochs)} of {run.epochs}"
        saved = None if self._saver is None else (self._saver.folder, self._saver.last)
        is_writing = self._saver is not None and self._saver.writer.busy
        words = ending_words(run.stop.why or "", place, saved, is_writing=is_writing)
        self._display.say(f"{words}: nothing is left to train" if run.stop.is_final and not run.items else words)
