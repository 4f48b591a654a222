"""`TrainingRun`: the epochs and steps of a run. What else happens is done by parts, none of which is named here."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hotloop.records import BestEpoch, Epoch
from hotloop.run.part import Parts
from hotloop.run.stop import FAILURES, Stop, is_of_a_loader
from hotloop.run.training_data import Work

if TYPE_CHECKING:
    from hotloop.run.core import Core
    from hotloop.run.loop import Loop


@dataclass(eq=False)
class TrainingRun:
    """A run of some epochs: where it is, and what its parts tell one another."""

    loop: "Loop"
    core: "Core"
    epochs: int  # to train
    length: int | None  # batches of an epoch, where that is known
    epoch: int = 0  # epochs that are done, those of earlier parts of the run included
    batches: int = 0  # of the epoch in progress that were trained on
    items: int = 0  # trained on since this part of the run began
    is_between: bool = False  # an epoch has ended, and none has begun since
    history: list[Epoch] = field(default_factory=list)
    best: BestEpoch | None = None
    unevaluated: Epoch | None = None  # while it is being evaluated, or where the run ends before that is done
    stop: Stop = field(default_factory=Stop)
    is_cut_short: bool = False  # ended before all that belongs to the last epoch was done
    unsaved: set[str] = field(default_factory=set)  # names of state that training changes and no checkpoint holds
    say: Callable[[str], None] = lambda words: None
    began: tuple[float, int] = (0.0, 0)  # the epoch in progress: when, and after how many items

    def train(self, parts: Parts, work: Callable[[], Iterable[Work]]) -> None:
        """Train the epochs that are left."""
        with parts.around():
            with self._ended_by_stop():
                parts.begin()
                if self.unevaluated is not None:  # an earlier part of the run had no time for that
                    self._note(parts, self.unevaluated, whole=True)
                    parts.after_epoch()
                while self.epoch < self.epochs and not self.must_end() and self._epoch(parts, work):
                    pass
                self.core.switch.step.share_buffers()  # where it ends in the middle of an epoch
                self._tell_known_epochs(parts, wait=True)
                parts.end()
            parts.finish()

    def _epoch(self, parts: Parts, work: Callable[[], Iterable[Work]]) -> bool:
        """One epoch or the rest of it; returns whether it had a batch."""
        self.is_between, whole = False, False
        self.began = time.perf_counter(), self.items
        parts.begin_epoch()
        try:
            for batch, batches, items in work():
                for before_step in parts.before_step:
                    before_step(batches)
                loss = self.loop.step(batch) if batches == 1 else None  # several were trained on in one CUDA graph
                self.batches += batches
                self.items += items * self.core.ranks.size
                for after_step in parts.after_step:
                    after_step(loss, batches)
                if self._between_windows(parts, items):
                    break
            else:
                whole = True
                parts.after_batches()
        except (KeyboardInterrupt, *FAILURES) as error:
            if not self.stop.explains(error):
                raise
            if is_of_a_loader(error):  # nothing was left half done here
                self._between_windows(parts, 0)
        parts.end_epoch(whole)
        if not self.core.watch.items_seen:
            return False  # it was stopped before the first batch
        if whole:
            self.epoch, self.batches, self.is_between = self.epoch + 1, 0, True
        is_last = self.epoch == self.epochs or self.stop.asked
        self._tell_known_epochs(parts, wait=is_last or parts.wants_to_save())
        if whole:
            parts.after_epoch()
        return True

    def _between_windows(self, parts: Parts, items: int) -> bool:
        """After a step on so many items: let parts save where that is due; returns whether the run has to end here."""
        save = False
        for is_due in parts.is_due:
            save = is_due() or save
        stop, save = self.core.ranks.after_step(self.stop.asked, save, items)
        if (
            not (stop or save) or not self.loop.is_between_windows
        ):  # a gradient waits for its update, a few batches ahead
            return False
        self._tell_known_epochs(parts, wait=True)
        parts.between_windows(stop)
        self.core.ranks.saved()
        if stop:
            self.stop.ask("another rank")
        return stop

    def _tell_known_epochs(self, parts: Parts, *, wait: bool = False) -> None:
        """Tell parts of the epochs whose losses have reached the host by now."""
        for epoch, whole in parts.known_epochs(wait):
            self._note(parts, parts.complete(epoch), whole=whole)

    def _note(self, parts: Parts, epoch: Epoch, *, whole: bool) -> None:
        """Evaluate after an epoch, keep its record, and tell the parts."""
        if whole and parts.evaluates:
            epoch = self._evaluated(parts, epoch)
        self.history.append(epoch)
        parts.epoch_known(epoch)
        if whole and not self.is_cut_short:
            parts.epoch_done(epoch)

    def _evaluated(self, parts: Parts, epoch: Epoch) -> Epoch:
        """The record of an epoch with its scores; without, where the run ends before they are known."""
        self.unevaluated = epoch
        parts.before_evaluation()
        try:
            if not self.must_end():
                with self.stop.at_once() if self.core.ranks.size == 1 else nullcontext():
                    return parts.evaluate(epoch)
        except (KeyboardInterrupt, *FAILURES) as error:
            if not self.stop.explains(error):
                raise
        finally:
            self.unevaluated = None
        self.is_cut_short = True  # it is evaluated when the run goes on
        return epoch

    @contextmanager
    def _ended_by_stop(self) -> Iterator[None]:
        """Take an error that is the end which was asked for as the end of a run cut short."""
        try:
            yield
        except KeyboardInterrupt as error:
            if self.core.ranks.size > 1 or not self.stop.explains(error):
                raise
            self.is_cut_short = True

    def resume_at(self, epoch: int, batches: int | None) -> None:
        """Go on after so many epochs, and so many batches of the next one; None: between two epochs."""
        self.epoch, self.batches, self.is_between = epoch, batches or 0, batches is None

    @property
    def left(self) -> int | None:
        """Batches that are still to be trained on; None where an epoch has no known length."""
        return None if self.length is None else (self.epochs - self.epoch) * self.length - self.batches

    @property
    def rate(self) -> float:
        """Items per second in this epoch."""
        began, before = self.began
        return (self.items - before) / (time.perf_counter() - began)

    @property
    def is_complete(self) -> bool:
        """Whether every epoch was trained and evaluated."""
        return self.epoch >= self.epochs and not self.is_cut_short

    def must_end(self) -> bool:
        """Between two epochs: whether the run has to end, on this rank or on any other."""
        if asked := self.core.ranks.any(self.stop.asked):
            self.stop.ask("another rank")
        return asked
