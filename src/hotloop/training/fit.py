"""`Fit`: a training run around `Loop.step`: epochs, evaluation, progress, Ctrl-C, report."""

import math
import platform
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate, default_convert

from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.data import Resumption
from hotloop.data.samplers import has_known_sampler, samplers_of
from hotloop.data.validation import Validation
from hotloop.device.clock import Clock
from hotloop.errors import HotloopError
from hotloop.evaluation import Metrics
from hotloop.levers import levers_of
from hotloop.levers.flags import fused_steps
from hotloop.memory.release import EmptyCacheWatch
from hotloop.objective.objectives import Predict
from hotloop.objective.objectives import predict as predict_by_convention
from hotloop.printing.text import printable, shorten
from hotloop.records import Epoch, PlanChange, Report
from hotloop.step.sharding import local_shard, sharded
from hotloop.training.changes import Changes, Unsaved
from hotloop.training.core import Core, Work
from hotloop.training.epoch_columns import EpochColumns, epochs_of
from hotloop.training.hooks import BestSoFar, EpochRecord, RunHooks, StepRecord, asks_to_stop
from hotloop.training.journal import Journal
from hotloop.training.progress import FAILURES, Display, Stop, ending_words, is_of_a_loader
from hotloop.training.scores import EpochScores, Scored
from hotloop.training.state import (
    Form,
    all_or_nothing,
    check_run,
    handed_to,
    is_shaped,
    kept_settings,
    load_module,
    load_position,
    load_rng_states,
    load_tensors,
    loader_rng_restorer,
    modules_of,
    position_of,
    state_of,
)
from hotloop.training.state import check as check_state
from hotloop.training.watch import Ending
from hotloop.values.rng import RngStates
from hotloop.values.snapshot import Snapshot

if TYPE_CHECKING:
    from hotloop.training.loop import Loop
    from hotloop.training.saving import Saver

_NOTHING = nullcontext()


class Trained(NamedTuple):
    """A trained epoch, whose losses may still be on the device."""

    number: int
    ending: Ending
    clock: Clock
    end: Any
    earlier: float  # seconds of it in an earlier part of the run
    whole: bool  # whether it came to its end
    scores: EpochScores


@dataclass
class Fit:
    """A run in progress."""

    loop: "Loop"
    core: Core
    journal: Journal
    saver: "Saver | None" = None
    time_limit: float | None = None  # seconds
    loader: Iterable[Any] = ()
    validate: Iterable[Any] | None = None
    transform: object = None  # of batches on the device
    predict: Predict = predict_by_convention  # gives output and target of a batch of `validate`
    hooks: RunHooks = field(default_factory=RunHooks)
    scored: Scored | None = None  # the criterion, where it adds up metrics
    stop: Stop = field(default_factory=Stop)
    epochs: list[Epoch] = field(default_factory=list)
    first: int = 0  # epochs that an earlier part of the run has done
    consumed: int = 0  # batches of the epoch in progress that were trained on
    display: Display = field(init=False)
    _pending: "deque[Trained]" = field(default_factory=deque)  # epochs whose losses are under way

    def __post_init__(self) -> None:
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._clock = time.perf_counter()
        self._epoch_clock = self._clock
        self._epoch_earlier = 0.0  # seconds of the epoch in progress, in an earlier part
        self._earlier: dict[str, Any] = {"seconds": 0.0, "tuning": 0.0, "saving": 0.0, "peak_memory": 0}
        self._resumed = 0
        self._between = False  # an epoch has ended and none has begun since
        self._columns = EpochColumns()
        self._items = 0  # trained on, since it began or last went on
        self._resumption = Resumption()
        self._validation = Validation(self.validate, self.loop.device, saved=self.saver is not None)
        self._changes = None if self.saver is None else self._changes_of_the_run(self.saver)
        self._unsaved: Unsaved | None = None
        self._is_patience_over = False  # the run is done, whatever number of epochs is left
        self._lost: list[str] = []  # names of what training changes and no checkpoint holds
        self._form: Form | None = None  # what the script has built, which a checkpoint must fit
        self._kept_settings: list[str] = []  # of optimizers: those of the checkpoint that are not the script's
        self._is_read_back = False  # whether a checkpoint was
        self._is_refused = False
        self._plans: list[PlanChange] = []  # of earlier parts
        self._unevaluated: Epoch | None = None  # an epoch that an earlier part had no time to evaluate
        self._cut_short = False  # the evaluation after the last epoch
        self._last: dict[str, Any] | None = None  # the state before it
        self._best_so_far = BestSoFar(self.hooks.goal)
        self._best_weights: list[dict[str, Any]] | None = None  # of the best epoch of this part, where they are wanted
        self._tuned_before = self.core.tuner.seconds
        self._before = (self.loop.steps, self.loop.skipped, self.core.watch.batches, self.loop.out_of_memory)
        self._planned = len(self.core.plans) - 1  # the plan that this part begins with
        if self.loop.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.loop.device)

    def _changes_of_the_run(self, saver: "Saver") -> Changes:
        """The `Changes` of the run; those of the loop so far where the same loop resumes, as in a notebook."""
        core = self.core
        makers = {**makers_of(self.loader), **makers_of(self.validate, "validation ")}
        others = {**handed_to(core, self.transform, makers), **self.hooks.handed()}
        known = [self.loop, core, self, saver, self.loader, self.validate]
        if saver.found is None or core.changes is None:
            modules = modules_of(core)
            core.changes = Changes(modules, self.core.schedule.schedulers, others, core.stateful, core.device, known)
        else:
            core.changes.hand(others, core.stateful, known)
        return core.changes

    def load_state_dict(self, tree: dict[str, Any], tell: Callable[[str], None], check: Callable[[], None]) -> None:
        """Load a checkpoint; where it is of another run, or damaged, nothing has changed.

        `check` is called when the position is known, and raises where the rest of the run is impossible.
        """
        assert self._changes is not None
        core = self.core
        with all_or_nothing() as undo:
            check_run(tree)
            other_ranks = core.together.adapt_checkpoint(tree, self.loader)
            changes, run = tree["changes"], tree["run"]
            self._form = Form.of(core)
            check_state(self._form, tree["loop"])
            self._changes.check(changes)
            self._kept_settings = kept_settings(core, tree["loop"])
            undo.callback(RngStates(core.device).restore)
            undo.callback(partial(vars(self).update, dict(vars(self))))
            missing = self._changes.load_stateful(changes, undo)
            self._resumption = load_position(core, self.loader, tree["loop"], tree["position"], tell, undo)
            undo.callback(loader_rng_restorer(self.validate))
            reasons = [self._resumption.reason, other_ranks, self._validation.load_state_dict(run["draws"])]
            missing += self._changes.load_generators(changes, undo)
            self._lost = list(run.get("lost", []))
            self.first, self.consumed = run["first"], run["consumed"] or 0
            self.epochs, self._columns = epochs_of(run["epochs"]), EpochColumns()
            self._started, self._earlier = run["started"], run["so_far"]
            self._epoch_earlier = run["epoch_seconds"]
            self._unevaluated = None if run["unevaluated"] is None else Epoch.from_json(run["unevaluated"])
            self._resumed = run["resumed"] + 1
            self._before = tuple(run["before"])
            self._plans = [PlanChange.from_json(change) for change in run.get("plans", [])]
            self._changes.restore_settings(changes, undo)
            check()
            load_rng_states(core, tree["loop"])  # what is no state of a generator shows here
            missing += load_tensors(core, tree["loop"], undo)
            missing += self._changes.load_attributes(changes, core.device)
            load_rng_states(core, tree["loop"])
        if self.scored is not None and not core.together.is_first:
            self.scored.begin_epoch()  # the first rank has the sums of all
        if missing:
            reasons.append(f"the checkpoint and this run differ in: {shorten(missing, 6)}")
        if self._lost:
            reasons.append(f"training had changed state that no checkpoint holds: {shorten(self._lost, 6)}")
        self._resumption = replace(self._resumption, reason="; ".join(filter(None, reasons)) or None)
        core.journal("that of the checkpoint")
        self._planned = len(core.plans) - 1
        if self.epochs and not self.consumed and self._unevaluated is None:
            self._end_without_progress()

    def run(
        self,
        epoch: Callable[[], Iterable[Work]],
        length: int | None,
        epochs: int,
        metrics: Metrics | None,
        progress: bool | None,
    ) -> Report:
        """Train, evaluate after each epoch, and return the report; `epoch()` gives the batches."""
        validate = self._validation.loader
        wait = validate is not None or self.loop.device.type != "cuda" or self.core.schedule.watches_a_metric
        wait = wait or self.core.together.size > 1  # ranks add up their losses at one moment
        wait = wait or bool(self.hooks.on_epoch)  # they see the weights of their epoch, and may change the next one
        shown = Display(epochs, length, progress, done=self.first * (length or 0) + self.consumed)
        listening = self.stop.listening(terminate=self.saver is not None)
        is_over = False
        try:
            with listening, self.journal, shown as self.display, EmptyCacheWatch() as self._cache:
                self.core.tuner.display = self.display
                if (words := self.core.together.words(self.core.model, self.core.plan, self.loader)) is not None:
                    self.display.say(words)
                self._say_where_it_goes_on(epochs, length)
                with self._second_interrupt():
                    if self.saver is not None and self._changes is not None:
                        if is_shaped(self.core):
                            state = state_of(self.core)
                            self.saver.check({"loop": state, "changes": self._changes.state_dict()})
                        self._form = self._form or Form.of(self.core)
                        self._unsaved = Unsaved(self._changes, self._searched())
                    if self._unevaluated is not None:
                        self._note(self._unevaluated, validate, metrics, whole=True)
                        self._save_epoch(validate, metrics, last=self._is_asked() or self.first >= epochs)
                    for number in range(self.first + 1, epochs + 1):
                        if self._is_asked():
                            break
                        whole = self._train(number, epoch(), last=number == epochs)
                        if whole and length is None:
                            self.core.together.meet(self.core.epoch, self.consumed)
                        if not self.core.watch.items_seen:
                            break  # stopped before the first batch
                        self._finish(validate, metrics, wait=wait)
                        if whole:
                            self.first, self.consumed, self._between = number, 0, True
                            self._save_epoch(validate, metrics, last=self._is_asked() or number == epochs)
                    self.core.step.share_buffers()  # where it was stopped in the middle of an epoch
                    self._finish(validate, metrics, wait=True)
                    self._save_end()
                    self._restore_best()
                self._say_how_it_ended(epochs)
                self.core.together.end()
                self.core.rest()  # while the death of workers is not told everywhere
                is_over = True
        except FAILURES as error:
            if not (is_over and self.stop.asked and is_of_a_loader(error)):
                raise  # PyTorch tells of a worker that the same signal has ended, wherever this thread is by then
        finally:
            self.core.tuner.display = None
        return self._report(done=self.first >= epochs and not self._cut_short)

    @contextmanager
    def _second_interrupt(self) -> Iterator[None]:
        """Take a second Ctrl-C, between two epochs or in a save, as the end of a run cut short."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.stop.twice or self.core.together.size > 1:
                raise
            self._cut_short = True

    def close(self) -> None:
        """End validation workers and note the state, however the run ended."""
        self._validation.close()
        if self._changes is not None:
            self._changes.leave()

    def _say_where_it_goes_on(self, epochs: int, length: int | None) -> None:
        if not self._resumed:
            return
        if self.first >= epochs and self._unevaluated is None:
            every = "the epoch was" if epochs == 1 else f"all {epochs} epochs were"
            self.display.say(f"{every} done at step {self.loop.steps}: nothing is left to train")
            return
        if self._is_patience_over:
            return  # the line of its end tells all
        place = f"after epoch {self.first} of {epochs}"
        if self.consumed:
            every = "" if length is None else f" of {length}"
            place = f"in epoch {self.first + 1} of {epochs}, after batch {self.consumed}{every}"
        self.display.say(f"resuming from step {self.loop.steps}, {place}")
        if self._kept_settings:
            self.display.say(f"the optimizer keeps the settings of the checkpoint: {shorten(self._kept_settings, 3)}")
        if why := self._resumption.reason:
            warnings.warn(f"the run may differ from one that never stopped: {why}", CheckpointWarning, stacklevel=4)

    def _say_how_it_ended(self, epochs: int) -> None:
        """Say why a run ended early, what was saved, and how to resume."""
        if not self.stop.asked or (self.first >= epochs and not self._cut_short):
            return
        place = f"step {self.loop.steps:,}, epoch {min(self.first + 1, epochs)} of {epochs}"
        saved = None if self.saver is None else (self.saver.folder, self.saver.last)
        is_writing = self.saver is not None and self.saver.writer.busy
        words = ending_words(self.stop.why or "", place, saved, is_writing=is_writing)
        self.display.say(f"{words}: nothing is left to train" if self._is_patience_over and not self._items else words)

    def _train(self, number: int, work: Iterable[Work], *, last: bool) -> bool:
        """Train one epoch or the rest of it; returns whether it came to its end."""
        self._between = False
        clock = Clock(self.loop.device)
        start = self._epoch_clock = time.perf_counter()
        done, whole = 0, False
        loop, on_step = self.loop, self.hooks.on_step
        record: StepRecord | None = None
        if self.scored is not None and not self.consumed:
            self.scored.begin_epoch()
        try:
            for batch, batches, items in work:
                self.journal.before_step()
                if batches == 1:  # several are trained on already, in one CUDA graph
                    with self._scoring():
                        loss = loop.step(batch)
                    if on_step:  # few calls: this comes with every step
                        record = StepRecord(self.core.step.counts.steps, number, self.consumed + 1, loss, loop)
                        self._ask(on_step, record, "on_step")
                self.stop.shield()
                items = self.core.together.counted(items)  # noqa: PLW2901  # those of all ranks
                done += items
                self.consumed += batches
                self._items += items
                self._cache.step()
                rate = done / (time.perf_counter() - start)
                self.display.stretch(batches, number, self.core.watch.latest, rate)
                self.journal.stretch(self.core.watch.latest, rate)
                if self._must_end():
                    break
            else:
                whole = True
                if record is not None and record.step != self.loop.steps:
                    record.step = self.loop.steps  # the end of the epoch has updated with a short window
                    self._ask(on_step, record, "on_step")
        except (KeyboardInterrupt, *FAILURES) as error:
            of_a_loader = is_of_a_loader(error)
            if not (self.stop.asked or (of_a_loader and self.stop.comes())):
                raise
            if of_a_loader:  # the signal also reached its workers; nothing was left half done here
                self._must_end()
        self._queue(number, clock, whole=whole)
        if whole and last:
            self.core.end_workers()  # which takes a while, in which a GPU is still busy
        return whole

    def _queue(self, number: int, clock: Clock, *, whole: bool) -> None:
        """Queue the epoch, or the part of it that was trained, for `_finish`."""
        if self.core.watch.items_seen:
            scores = EpochScores() if self.scored is None else self.scored.end_epoch()  # read after the losses
            means = self.core.watch.end_epoch()
            self._pending.append(Trained(number, means, clock, clock.lap(), self._epoch_earlier, whole, scores))
        if whole:
            self._epoch_earlier = 0.0

    def _scoring(self) -> AbstractContextManager[None]:
        """Context of a step, in which training metrics leave out a filler batch of this rank."""
        if self.scored is None or not self.core.together.is_filler(self.core.stream):
            return _NOTHING
        return self.scored.unchanged()

    def _ask(self, hooks: Sequence[Callable[[Any], object]], record: Any, name: str) -> None:
        is_fused = bool(hooks) and self.core.step.plan.fused
        try:
            with fused_steps(self.core.optimizers, by_hand=True) if is_fused else _NOTHING:
                stops = asks_to_stop(hooks, record, name)
        except RuntimeError as error:
            if self.core.plan.channels_last and "view size is not compatible" in str(error):
                error.add_note(
                    "hotloop: the plan has the weights of convolutions in channels_last, which view cannot flatten\n"
                    f'  fix: use reshape in {name}, or Loop(…, plan="plain") if that is not your code'
                )
            raise
        if stops and not self.stop.asked:
            self.stop.why = name

    def _must_end(self) -> bool:
        """After a stretch: save where due; returns whether the run has to end here."""
        if self.time_limit is not None and not self.stop.asked and self._seconds() > self.time_limit:
            self.stop.why = "the time limit"
        due = self.saver is not None and self.saver.is_due(self.loop.steps)
        stop, save = self.core.together.after_step(stop=self.stop.asked, save=due)
        if not self.loop.is_between_windows:  # a gradient waits for its update, a few batches ahead
            return False
        if self.saver is not None and (stop or save):
            self._finish(None, None, wait=True)  # epochs that are still under way were not to be evaluated
            self.saver.save(self.loop.steps, lambda: self._resumable(self._state_dict(self.consumed)), wait=stop)
            self.core.together.done()
        return self._ends(stop)

    def _is_asked(self) -> bool:
        """Between two epochs: whether the run has to end, on this rank or on any other."""
        return self._ends(self.core.together.any(self.stop.asked))

    def _ends(self, asked: bool) -> bool:
        if asked and not self.stop.asked:
            self.stop.why = "another rank"
        return asked

    def _save_epoch(self, validate: Iterable[Any] | None, metrics: Metrics | None, *, last: bool) -> None:
        """After an epoch: save where due, at the end of the run, and where the score is the best."""
        if self.saver is None or self._last is not None:
            return
        score = self.hooks.goal.score(self.epochs[-1]) if self.epochs and not self._pending else math.inf
        is_best = score < math.inf and self._best() == self.epochs[-1].number
        if last or is_best or self.core.together.any(self.saver.is_due(self.loop.steps)):
            self._finish(validate, metrics, wait=True)
            self._tell_what_is_lost(surely=last)
            self.saver.save(
                self.loop.steps,
                lambda: self._resumable(self._state_dict(None)),
                None if score == math.inf else score,
                wait=last,
            )

    def _save_end(self) -> None:
        """Save the end where it is not yet: the evaluation was cut short, or the run was stopped between two epochs."""
        if self.saver is None:
            return
        if self.stop.twice and self.saver.writer.busy:
            self.display.say(f"still writing a checkpoint to {printable(str(self.saver.folder))}")
        self.saver.settle()
        is_missing = self.stop.asked and self._between and self.saver.last != self.loop.steps
        is_missing = self.core.together.from_first(is_missing)  # which alone knows whether the last one was written
        if (last := self._last) is not None:
            self.saver.save(self.loop.steps, lambda: self._resumable(last), wait=True)
        elif is_missing:
            self.saver.save(self.loop.steps, lambda: self._resumable(self._state_dict(None)), wait=True)

    def _searched(self) -> dict[str, object]:
        """More objects that training may change: samplers, or a loader of the person's own."""
        found = {"sampler": samplers_in(self.loader), "validation sampler": samplers_in(self.validate)}
        return {name + ".sampler" * n: each for name, several in found.items() for n, each in enumerate(several)}

    def _tell_what_is_lost(self, *, surely: bool = False) -> None:
        """Warn once for each name of state that training changes and no checkpoint holds."""
        if self._unsaved is None:
            return
        in_workers = self.core.stream.changed_in_workers if self.core.stream else []
        names = {*self._unsaved.names(surely=surely), *in_workers, *self._validation.changed_in_workers}
        if new := sorted(names - set(self._lost)):
            self._lost = sorted(names | set(self._lost))
            warnings.warn(
                f"training changes state that no checkpoint holds, so a resumed run starts without it:"
                f" {shorten(new, 6)}\n  fix: give it state_dict and load_state_dict and pass it:"
                " Loop(…, stateful={…}); or keep it as a buffer or a plain attribute of a module",
                CheckpointWarning,
                stacklevel=6,
            )

    def _resumable(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The tree of a checkpoint: warn once where the script would refuse it. The first one is checked closely."""
        assert self._changes is not None
        assert self._form is not None
        if self._is_refused:
            return tree
        try:
            with all_or_nothing():
                check_run(tree)
                check_state(self._form, tree["loop"], tries=not self._is_read_back)
                self._changes.check(tree["changes"])
        except HotloopError as error:
            self._is_refused = True
            if self.core.together.is_first:
                warnings.warn(
                    f"the script cannot resume from the checkpoint of step {self.loop.steps}: {error.what}\n  fix:"
                    " build everything in its final form before fit: buffers in their final shape, all layers, all"
                    " groups of an optimizer, which skips what has no gradient; keep settings that it would accept",
                    CheckpointWarning,
                    stacklevel=6,
                )
        self._is_read_back = True
        return tree

    def _state_dict(self, consumed: int | None, unevaluated: Epoch | None = None) -> dict[str, Any]:
        """The tree of a checkpoint after `consumed` batches of the epoch; None between two epochs."""
        assert self._changes is not None
        self._tell_what_is_lost(surely=self.stop.asked)
        inside = consumed is not None
        run = {
            "first": self.first if unevaluated is None else unevaluated.number,
            "consumed": consumed,
            "epochs": self._columns.state_dict(self.epochs),
            "started": self._started,
            "so_far": self._so_far(),
            "epoch_seconds": self._epoch_earlier + time.perf_counter() - self._epoch_clock if inside else 0.0,
            "unevaluated": None if unevaluated is None else unevaluated.to_json(),
            "resumed": self._resumed,
            "before": list(self._before),
            "draws": self._validation.state_dict(),
            "lost": self._lost,
            "plans": [change.to_json() for change in self._all_plans()],
        }
        if self.scored is not None and self.core.together.ranks is not None:
            self.scored.give_to_first(self.core.together.ranks)
        changes = self._changes.state_dict()
        loop = state_of(self.core)
        return {
            "loop": loop,
            "changes": changes,
            "position": position_of(self.core, consumed),
            "run": run,
            "ranks": self.core.together.state(loop, self.loader),
        }

    def _all_plans(self) -> list[PlanChange]:
        """Every plan of this run with its first batch, earlier parts included."""
        self.core.journal("the step was changed while it ran")  # where many steps at once have not noted it yet
        plans = list(self._plans)
        steps, _, batches, _ = self._before
        for change in self.core.plans[self._planned :]:
            if not plans or plans[-1].plan != change.plan:
                step, batch = max(0, change.step - steps), max(0, change.batch - batches)
                plans.append(replace(change, step=step, batch=batch))
        return plans

    def _seconds(self) -> float:
        return time.perf_counter() - self._clock

    def _so_far(self) -> dict[str, Any]:
        """Seconds and peak memory of the run, earlier parts included."""
        device, earlier = self.loop.device, self._earlier
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return {
            "seconds": earlier["seconds"] + self._seconds(),
            "tuning": earlier["tuning"] + self.core.tuner.seconds - self._tuned_before,
            "saving": earlier["saving"] + (0.0 if self.saver is None else self.saver.stall),
            "peak_memory": max(earlier["peak_memory"], peak),
        }

    def _finish(self, validate: Iterable[Any] | None, metrics: Metrics | None, *, wait: bool) -> None:
        """Note the epochs whose losses have reached the host; short epochs do not wait for them."""
        while self._pending and (wait or self._pending[0].ending.landed()):
            done = self._pending.popleft()
            means, items = self.core.together.means(done.ending.means(), float(done.ending.items))
            epoch = Epoch(
                number=done.number,
                loss=sum(means.values()),
                items=items,
                seconds=done.clock.seconds(done.end) + done.earlier,
                losses=means if len(means) > 1 else {},
                metrics={},
                train_metrics=done.scores.means(self.core.together.ranks),
            )
            self._note(epoch, validate, metrics, whole=done.whole)

    def _note(self, epoch: Epoch, validate: Iterable[Any] | None, metrics: Metrics | None, *, whole: bool) -> None:
        """Evaluate after an epoch and keep its record."""
        if whole and validate is not None:
            epoch = replace(epoch, metrics=self._scores(epoch, validate, metrics))
            if epoch.metrics:
                self.hooks.goal.check(epoch.metrics)
        if whole and not self._cut_short:
            self.core.schedule.after_evaluation(epoch, metrics)
        self.epochs.append(epoch)
        self.display.epoch(epoch)
        self.journal.epoch(epoch)
        if whole and not self._cut_short:
            self._after_epoch(epoch)

    def _after_epoch(self, epoch: Epoch) -> None:
        """Tell the hooks, keep the weights of the best epoch, and end the run where nothing gets better any more."""
        hooks = self.hooks
        if hooks.restores_best and self._best() == epoch.number:
            self._best_weights = _weights_of(modules_of(self.core))
        self._ask(hooks.on_epoch, EpochRecord(epoch, self.loop.steps, self.loop), "on_epoch")
        if not self.stop.asked:
            self._end_without_progress()

    def _end_without_progress(self) -> None:
        """End the run where the last `patience` epochs were no better."""
        if (patience := self.hooks.patience) is not None:
            best = self._best_so_far.of(self.epochs)
            self.stop.why = self.hooks.goal.words_for_patience(best, self.epochs[-1], patience)
            self._is_patience_over = self.stop.asked

    def _best(self) -> int | None:
        """The number of the best epoch so far."""
        best = self._best_so_far.of(self.epochs)
        return None if best is None else best.epoch

    def _restore_best(self) -> None:
        """Load the weights of the best epoch into model and criterion; where they do not fit, nothing changes."""
        best = self._best()
        if not self.hooks.restores_best or best is None or best == self.epochs[-1].number:
            return
        modules = modules_of(self.core)
        self.core.modes.eval()  # as the optimizer was when they were kept
        with self.core.unplanned():
            before = Snapshot().values((t for m in modules for t in (*m.parameters(), *m.buffers())), on_host=True)
            try:
                weights = self._best_weights or self._saved_weights(best, modules)
                for module, values in zip(modules, weights, strict=True):
                    now = module.state_dict()
                    load_module(module, {name: _loadable(now.get(name), each) for name, each in values.items()})
            except (RuntimeError, HotloopError) as error:
                before.restore()
                warnings.warn(
                    f"restore_best: the weights of epoch {best} cannot be restored, so those of the last epoch stay:"
                    f" {printable(' '.join(getattr(error, 'what', str(error)).split())[:300])}",
                    CheckpointWarning,
                    stacklevel=4,
                )

    def _saved_weights(self, number: int, modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
        """The weights of the best epoch from the checkpoint of an earlier part of the run."""
        from hotloop.checkpoint.reader import read_checkpoint, read_sums

        path = None if self.saver is None else self.saver.writer.store.best()
        if self.saver is None or path is None:
            raise HotloopError("no checkpoint holds them")
        tree = read_checkpoint(path, read_sums(path), self.saver.writer.team).tree
        if tree["run"]["first"] != number:
            raise HotloopError(f"the best checkpoint, {path.name}, is of epoch {tree['run']['first']}")
        states = [tree["loop"]["model"], *tree["loop"]["others"]]
        return [dict(sharded(*pair)) for pair in zip(modules, states, strict=True)]

    def _scores(self, epoch: Epoch, validate: Iterable[Any], metrics: Metrics | None) -> dict[str, float]:
        """Scores of the evaluation after an epoch; empty where the run ends before it is done."""
        before = None if self.saver is None else self._state_dict(None, epoch)
        if not self._is_asked():
            try:
                with self.stop.at_once() if self.core.together.size == 1 else nullcontext():
                    return self.loop.evaluate(validate, metrics, predict=self.predict)
            except KeyboardInterrupt:
                self.stop.why = self.stop.why or "Ctrl-C"
            except FAILURES as error:
                if not (self.stop.asked or (is_of_a_loader(error) and self.stop.comes())):
                    raise
        self._cut_short, self._last = True, before  # it is evaluated when the run goes on
        return {}

    def _report(self, *, done: bool) -> Report:
        loop = self.loop
        steps, skipped, first, failures = self._before
        so_far = self._so_far()
        return Report(
            device=str(loop.device),
            device_name=loop.choice.name,
            reason=loop.choice.reason,
            precision=loop.plan.precision,
            parameters=sum(p.numel() for p in loop.model.parameters()),
            started=self._started,
            seconds=so_far["seconds"],
            steps=loop.steps - steps,
            skipped=loop.skipped - skipped,
            interrupted=self.stop.asked and not (done or self._is_patience_over),
            epochs=tuple(self.epochs),
            curve=tuple((batch - first, loss) for batch, loss in self.core.watch.curve if batch > first),
            peak_memory=so_far["peak_memory"] if loop.device.type == "cuda" else None,
            versions={"python": platform.python_version(), "torch": str(torch.__version__)},
            levers=(*levers_of(loop.plan), *(["expandable segments"] if loop.fragmented else [])),
            tuning=so_far["tuning"],
            out_of_memory=loop.out_of_memory - failures,
            micro_batch=loop.plan.micro_batch,
            stopped=None if done else self.stop.why,
            resumed=self._resumed,
            saved=None if self.saver is None else self.saver.last,
            saving=so_far["saving"],
            load=self.journal.load,
            watched=self._items,
            plans=tuple(self._all_plans()),
            ranks=self.core.together.size,
            batch=self.core.together.global_batch(self.loader),
            best=self._best_so_far.of(self.epochs),
            by_rank=self.core.together.by_rank(self.core.step),
            parallel=None if self.core.together.spread is None else self.core.together.spread.words(),
        )


def _weights_of(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The state_dicts of modules, copied to the host."""
    return [
        {
            name: local_shard(value).detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in module.state_dict().items()
        }
        for module in modules
    ]


@torch.no_grad()
def _loadable(now: Any, value: Any) -> Any:
    """A value for `load_state_dict`; a local shard is copied into its sharded tensor."""
    if not hasattr(now, "to_local") or not isinstance(value, Tensor) or hasattr(value, "to_local"):
        return value
    now.to_local().copy_(value)
    return now


def makers_of(loader: object, prefix: str = "") -> dict[str, object]:
    """The dataset and collate_fn of a loader, where they run in this process."""
    if not isinstance(loader, DataLoader) or loader.num_workers:
        return {}
    makers: dict[str, object] = {f"{prefix}dataset": loader.dataset}
    if loader.collate_fn not in (default_collate, default_convert):
        makers[f"{prefix}collate_fn"] = loader.collate_fn
    return makers


def samplers_in(loader: object) -> list[object]:
    """The samplers of a loader that are the person's own."""
    if not isinstance(loader, DataLoader) or has_known_sampler(loader):
        return []
    return list(samplers_of(loader))
