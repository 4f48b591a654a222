"""`train`: the epochs and steps of a run. What happens beside them is done by parts, none of which is named here."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotloop.records import BestEpoch, Epoch
from hotloop.training.part import Parts
from hotloop.training.stop import FAILURES, Stop, is_of_a_loader

if TYPE_CHECKING:
    from hotloop.training.core import Core
    from hotloop.training.loop import Loop
    from hotloop.training.saving import Saver

Work = tuple[Any, int, int]  # a batch to train on, or several that are done; how many, and their items


@dataclass
class RunState:
    """Where a run is, and what its parts tell one another."""

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
    is_done: bool = False  # nothing is left to do, whatever number of epochs is left
    is_cut_short: bool = False  # ended before all that belongs to the last epoch was done
    unsaved: set[str] = field(default_factory=set)  # names of state that training changes and no checkpoint holds
    saver: "Saver | None" = None  # where the run is saved
    say: Callable[[str], None] = lambda words: None
    began: tuple[float, int] = (0.0, 0)  # the epoch in progress: when, and after how many items

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
        asked = self.core.ranks.any(self.stop.asked)
        self.stop.why = self.stop.why or ("another rank" if asked else None)
        return asked


def train(run: RunState, parts: Parts, work: Callable[[], Iterable[Work]]) -> None:
    """Train the epochs that are left."""
    with parts.around():
        with _cut_short_by(run, parts):
            parts.begin()
            if run.unevaluated is not None:  # an earlier part of the run had no time for that
                _note(run, parts, run.unevaluated, whole=True)
                parts.after_epoch()
            while run.epoch < run.epochs and not run.must_end() and _epoch(run, parts, work):
                pass
            run.core.switch.step.share_buffers()  # where it ends in the middle of an epoch
            _tell_known_epochs(run, parts, wait=True)
            parts.end()
        parts.finish()


def _epoch(run: RunState, parts: Parts, work: Callable[[], Iterable[Work]]) -> bool:
    """One epoch or the rest of it; returns whether it had a batch."""
    run.is_between, whole = False, False
    run.began = time.perf_counter(), run.items
    parts.begin_epoch()
    try:
        for batch, batches, items in work():
            parts.before_step(batches)
            loss = run.loop.step(batch) if batches == 1 else None  # several were trained on in one CUDA graph
            run.batches += batches
            run.items += items * run.core.ranks.size
            parts.after_step(loss, batches)
            if _between_windows(run, parts, items):
                break
        else:
            whole = True
            parts.after_batches()
    except (KeyboardInterrupt, *FAILURES) as error:
        if not run.stop.explains(error):
            raise
        if is_of_a_loader(error):  # nothing was left half done here
            _between_windows(run, parts, 0)
    parts.end_epoch(whole)
    if not run.core.watch.items_seen:
        return False  # it was stopped before the first batch
    if whole:
        run.epoch, run.batches, run.is_between = run.epoch + 1, 0, True
    is_last = run.epoch == run.epochs or run.stop.asked
    _tell_known_epochs(run, parts, wait=is_last or parts.is_due())
    if whole:
        parts.after_epoch()
    return True


def _between_windows(run: RunState, parts: Parts, items: int) -> bool:
    """After a step on so many items: let parts save where that is due; returns whether the run has to end here."""
    stop, save = run.core.ranks.after_step(run.stop.asked, parts.is_due(), items)
    if not run.loop.is_between_windows:  # a gradient waits for its update, a few batches ahead
        return False
    if stop or save:
        _tell_known_epochs(run, parts, wait=True)
        parts.between_windows(stop)
        run.core.ranks.saved()
    if stop and not run.stop.asked:
        run.stop.why = "another rank"
    return stop


def _tell_known_epochs(run: RunState, parts: Parts, *, wait: bool = False) -> None:
    """Tell parts of the epochs whose losses have reached the host by now."""
    for epoch, whole in parts.known_epochs(wait):
        _note(run, parts, parts.complete(epoch), whole=whole)


def _note(run: RunState, parts: Parts, epoch: Epoch, *, whole: bool) -> None:
    """Evaluate after an epoch, keep its record, and tell the parts."""
    if whole and parts.evaluates:
        epoch = _evaluated(run, parts, epoch)
    run.history.append(epoch)
    parts.epoch_known(epoch)
    if whole and not run.is_cut_short:
        parts.epoch_done(epoch)


def _evaluated(run: RunState, parts: Parts, epoch: Epoch) -> Epoch:
    """The record of an epoch with its scores; without, where the run ends before they are known."""
    run.unevaluated = epoch
    parts.before_evaluation()
    try:
        if not run.must_end():
            with run.stop.at_once() if run.core.ranks.size == 1 else nullcontext():
                return parts.evaluate(epoch)
    except (KeyboardInterrupt, *FAILURES) as error:
        if not run.stop.explains(error):
            raise
    finally:
        run.unevaluated = None
    run.is_cut_short = True  # it is evaluated when the run goes on
    return epoch


@contextmanager
def _cut_short_by(run: RunState, parts: Parts) -> Iterator[None]:
    """Take an error that is the end which was asked for as the end of a run cut short."""
    try:
        yield
    except KeyboardInterrupt as error:
        if run.core.ranks.size > 1 or not run.stop.explains(error):
            raise
        run.is_cut_short = True
