"""`TrainingData`: the epochs of a loop, batch by batch, and what is done before each step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from hotloop.data import Position, Stream, length_of
from hotloop.data.on_device import Resident
from hotloop.data.origin import nothing_came
from hotloop.memory.oom import ATTEMPTS, clear, is_out_of_memory
from hotloop.run.modes import TrainingModes
from hotloop.run.plan_switch import PlanSwitch
from hotloop.run.run_ranks import Alone
from hotloop.run.schedulers import Schedule
from hotloop.run.watch import Watch
from hotloop.tune.tuned_run import Ahead
from hotloop.tune.tuner import Tuner
from hotloop.values.reach import look
from hotloop.values.rng import RngStates, generators_in
from hotloop.values.snapshot import PassSnapshot

if TYPE_CHECKING:
    from hotloop.step.several import Stretches

UNTIMED = 8  # first steps of a loop by hand, of which nothing is timed: many a script has no more
Transform = Callable[[Any], Any]
Work = tuple[Any, int, int]  # a batch to train on, or several that are done; how many, and their items


class TrainingData:
    """Gives out the batches of epochs, on the device; before a step it asks the tuner."""

    def __init__(
        self, switch: PlanSwitch, tuner: Tuner, watch: Watch, schedule: Schedule, modes: TrainingModes, ranks: Alone
    ) -> None:
        self._switch, self._tuner, self._watch = switch, tuner, watch
        self._schedule, self._modes, self._ranks = schedule, modes, ranks
        self._device = switch.subject.device
        self.stream: Stream[Any] | None = None
        self.epoch = 0  # of the data, from 1 once it has begun
        self.given: Any = None  # the batch that was given out last
        self.expected: int | None = None  # batches of the run, where `fit` knows them
        self._is_one_by_one = False  # whether `fit` is told of each step, so that several in one graph are not used
        self._seen_before: dict[str, Any] | None = None  # of an epoch that is resumed, until it has begun
        self._reconsidered = 0  # batches, at which it is asked again whether a loop by hand goes on for long enough
        self._transforming: tuple[Transform, PassSnapshot] | None = None  # the latest transform, and what it changes

    def expect(self, batches: int | None, *, one_by_one: bool) -> None:
        """Note that a run of so many batches begins; `one_by_one`: it is told of each step."""
        self._is_one_by_one = one_by_one
        self.expected = None if batches is None else self._watch.batches + batches

    def batches(self, loader: Iterable[Any], transform: Transform | None) -> Iterator[Any]:
        """One epoch of `loader`, each batch already on the device."""
        batch = None
        try:
            for batch, _, _ in self.work(loader, transform, several=False):
                yield batch
        except GeneratorExit:  # the person has left the loop
            self.given = None if self.given is batch else self.given
            raise

    def work(self, loader: Iterable[Any], transform: Transform | None, *, several: bool = True) -> Iterator[Work]:
        """The same for `fit`; trains on `several` batches in one CUDA graph where it can."""
        loader = self._ranks.data.share(loader)
        stream = self._begin_epoch(loader)
        if stream.resident is not None and several:
            return self._from_device(stream, stream.resident, loader, transform)
        return self._from_stream(stream, loader, transform)

    def _from_stream(self, stream: Stream[Any], loader: Iterable[Any], transform: Transform | None) -> Iterator[Work]:
        for given in stream:
            batch = given if transform is None else self._transformed(transform, given)
            if self._watch.batches >= self._tuner.due:
                self._before_step(loader, transform, batch)
            self.given = batch
            yield batch, 1, self._switch.step.weighing.items_in(batch)
        self._end_epoch()

    def _from_device(
        self, stream: Stream[Any], resident: Resident, loader: Iterable[Any], transform: Transform | None
    ) -> Iterator[Work]:
        draws = resident.draws()
        number = stream.first
        while drawn := list(islice(draws, self._stretch_size(resident))):  # the plan may change after each
            if len(drawn) > 1 and self._watch.batches >= self._tuner.due:
                self._before_step(loader, transform, None, drawn, resident)
            origins = [resident.origin(place, each) for place, each in enumerate(drawn, number)]
            number += len(drawn)
            holds = len(drawn) > 1 and resident.holds(*drawn)
            stretch = self.stretches.of(self._switch.step.captured, resident, drawn, transform) if holds else None
            if stretch is not None:
                losses = stretch.run(drawn, self._schedule if self._schedule.schedulers else None)
                if losses is not None:
                    self._watch.see_stretch(stretch.names, (losses,), stretch.batch, origins)
                    yield None, len(drawn), len(drawn) * stretch.batch
                    continue
            for stream.origin, each in zip(origins, drawn, strict=True):
                batch = resident.batch(each)
                if transform is not None:
                    batch = self._transformed(transform, batch)
                if len(drawn) == 1 and self._watch.batches >= self._tuner.due:
                    self._before_step(loader, transform, batch, drawn, resident)
                self.given = batch
                yield batch, 1, self._switch.step.weighing.items_in(batch)
        if not self._watch.items_seen:
            raise nothing_came(loader)
        self._end_epoch()

    @cached_property
    def stretches(self) -> "Stretches":
        """Several captured steps in one CUDA graph."""
        from hotloop.step.several import Stretches  # noqa: PLC0415  # for a plan with captures alone

        return Stretches()

    def _stretch_size(self, resident: Resident) -> int:
        """The number of batches for one CUDA graph."""
        captured = self._switch.step.captured
        return 1 if captured is None or self._is_one_by_one else self.stretches.size(captured, resident)

    def _begin_epoch(self, loader: Iterable[Any]) -> Stream[Any]:
        self._switch.hold(alone=True)
        self.stream = stream = self.stream_of(loader)
        self._ranks.data.begin_epoch(stream)
        self.epoch += 1
        self._watch.begin_epoch(self.epoch, stream)
        if self._modes.begin_epoch(goes_on=self._seen_before is not None):
            self._switch.memory.snapshot.look_again()  # layers that were frozen may write to their buffers now
        if self._seen_before is not None:
            self._watch.load_state_dict(self._seen_before)
            self._seen_before = None
        if self.expected is None:  # else `fit` knows the whole
            self._tuner.begin()
        if self._switch.step.captured is not None:
            self._switch.step.captured.frozen.check()
        return stream

    def _end_epoch(self) -> None:
        self.given = None
        self._tuner.pause()
        self._switch.step.end_epoch()
        if self._switch.step.captured is not None:
            self._switch.step.captured.frozen.audit()
        self._schedule.after_epoch()
        self._modes.eval()

    def resume(
        self, loader: Iterable[Any], where: Position, undo: ExitStack, tell: Callable[[int, int], None]
    ) -> str | None:
        """Bring a loader to where a checkpoint has left it; returns why the rest may differ, or None."""
        undo.callback(partial(vars(self).update, dict(vars(self))))
        self.stream = self.stream_of(loader)
        reason = self.stream.resume(where, tell).reason
        if where.consumed is not None:
            self.epoch -= 1  # it begins once more
            self._seen_before = self._watch.state_dict()
        return reason

    def rest(self) -> None:
        """After the last epoch of a fit: end idle workers."""
        self.given = self.expected = None
        self._modes.eval()
        self.end_workers()
        self._switch.give_back()

    def end_workers(self) -> None:
        """End those that wait for another epoch."""
        if self.stream is not None:
            self.stream.close()

    def _transformed(self, transform: Transform, batch: Any) -> Any:
        """Transform a batch; where memory runs out, again after memory was freed."""
        if self._tuner.first.left:
            return self._tuner.first.watch({"device_transform": transform}, partial(transform, batch))
        if self._transforming is None or self._transforming[0] is not transform:
            held = look({"device_transform": transform}).generators
            self._transforming = (transform, PassSnapshot([], self._device, held))
        snapshot = self._transforming[1]
        for attempt in range(1, ATTEMPTS + 1):
            snapshot.take(batch)
            try:
                captured = self._switch.step.captured
                changed = (
                    transform(batch) if captured is None else self.stretches.transformed(transform, batch, captured)
                )
            except Exception as error:
                if not is_out_of_memory(error) or attempt == ATTEMPTS:
                    raise
            else:
                if snapshot.is_looking:
                    snapshot.learn()
                return changed
            snapshot.restore()
            self._switch.step.forget_captures()  # they hold memory
            clear(self._device)
        raise AssertionError  # the last attempt returns or raises

    def stream_of(self, loader: Iterable[Any]) -> Stream[Any]:
        """The stream of a loader; the same one for the same loader, so that persistent workers persist."""
        plan, now = self._switch.plan, self.stream
        # The tuner found, now or in the run whose file this is, that data may live on the device; another's may not.
        kind = "auto" if plan.stream == "resident" and not self._switch.by_hand else plan.stream
        asked = (kind, plan.pinned, plan.workers)
        if now is None or now.loader is not loader or now.asked != asked or not now.is_current:
            return Stream(loader, self._device, kind, pinned=plan.pinned, workers=plan.workers)
        return now

    def _before_step(
        self,
        loader: Iterable[Any],
        transform: Transform | None,
        batch: Any,
        drawn: Sequence[Any] = (None,),
        resident: Resident | None = None,
    ) -> None:
        ahead = Ahead(
            loader,
            transform,
            batch,
            len(drawn),
            self.stream,
            self._left(loader),
            self._switch.step.is_between_windows,
            can_be_several=resident is not None and not self._is_one_by_one and not self._switch.subject.on_ranks,
            sample=partial(self._sample, resident, drawn[0], transform),
        )
        self._tuner.before(ahead, self._watch.batches)

    def before_step_by_hand(self, batch: Any) -> None:
        """Before a step on a batch that `batches` did not give out.

        The person may have changed anything since the step before, and how many are to come nobody knows: as many as
        there were so far. A plan is not looked for where it, or the trial of it, could be felt.
        """
        if self._switch.step.captured is not None:
            self._switch.step.captured.check_step()
        done = self._watch.batches
        if done >= self._reconsidered:
            self._reconsidered = done + 1 + done // 8
            self._tuner.begin()
        if done >= max(self._tuner.due, UNTIMED) and self._may_tune():
            ahead = Ahead(
                None, None, batch, 1, self.stream, done, self._switch.step.is_between_windows, False, lambda: batch
            )
            self._tuner.before(ahead, done)

    def _may_tune(self) -> bool:
        """Whether a plan may be tried at a step by hand: no other loop's is applied, and nothing special is around."""
        if self._switch.subject.on_ranks or self.expected is not None or not self._switch.step.levers.is_alone():
            return False
        is_plain = torch.is_grad_enabled() and not torch.is_autocast_enabled(self._device.type)
        return is_plain and self._switch.subject.backend.is_ordinary_stream()

    @contextmanager
    def giving(self, batch: Any) -> Iterator[None]:
        """Take a batch for one that `batches` gave out."""
        before, self.given = self.given, batch
        try:
            yield
        finally:
            self.given = before

    def _sample(self, resident: Resident | None, drawn: Any, transform: Transform | None) -> Any:
        """A batch of the data on the device, with rng states restored afterwards."""
        assert resident is not None  # several steps go into one graph only where there is one
        batch = resident.batch(drawn)
        if transform is None:
            return batch
        before = RngStates(self._device, generators_in([transform]))
        try:
            return transform(batch)
        finally:
            before.restore()

    def _left(self, loader: Iterable[Any]) -> int | None:
        """Batches that remain: of this fit, or without one as many epochs as there were so far."""
        if self.expected is not None:
            return self.expected - self._watch.batches
        length = length_of(loader)
        return None if length is None else length * self.epoch

    @property
    def progress(self) -> list[int]:
        """Updates of the weights, the epoch, and the batches that were given out of it."""
        origin = None if self.stream is None else self.stream.origin
        return [self._switch.step.counts.steps, self.epoch, 0 if origin is None else origin.number + 1]

    def where(self) -> str:
        """The present batch, in words."""
        origin = self.stream.origin if self.stream else None
        if origin is None:
            return f"the batch of step {self._watch.batches + 1}"
        return f"batch {origin.number} of epoch {self.epoch}"
