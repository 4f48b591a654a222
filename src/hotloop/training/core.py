"""`Core`: the parts of a loop (model, step, schedule, data, tuner), and the switch from one plan to another."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.data import Stream, length_of
from hotloop.data.on_device import Resident
from hotloop.data.origin import nothing_came
from hotloop.device import Choice
from hotloop.errors import MemoryWarning, PlanWarning
from hotloop.evaluation import Evaluation
from hotloop.levers.applied import displace_plans
from hotloop.memory.oom import ATTEMPTS, clear, is_out_of_memory
from hotloop.objective.objectives import Criterion, Objective
from hotloop.plan import Plan
from hotloop.records import PlanChange
from hotloop.step.captured import settings_around
from hotloop.step.captured_graph import is_ordinary_stream
from hotloop.step.compilation import CompiledObjective
from hotloop.step.retry import OutOfMemory
from hotloop.step.several import Stretches, stretches
from hotloop.step.training import TrainingStep
from hotloop.training.changes import Changes
from hotloop.training.messages import advice_on_loss, memory_words
from hotloop.training.modes import OptimizerModes
from hotloop.training.run_ranks import Alone
from hotloop.training.schedulers import Schedule
from hotloop.training.watch import Watch
from hotloop.tune.subject import Subject
from hotloop.tune.tuner import Ahead, Tuner
from hotloop.values.effects import counted_per_call, look, watched_changes
from hotloop.values.rng import RngStates, generators_in
from hotloop.values.snapshot import PassSnapshot

UNTIMED = 8  # first steps of a loop by hand, of which nothing is timed: many a script has no more
Transform = Callable[[Any], Any]
Work = tuple[Any, int, int]  # a batch to train on, or several that are done; how many, and their items


class Core:
    """The parts of a loop. `Loop` is its face, `Fit` runs it for some epochs, a checkpoint holds its state."""

    step: TrainingStep  # what is carried out
    tuner: Tuner
    watch: Watch

    def __init__(
        self,
        choice: Choice,
        subject: Subject,
        begin: Plan,
        *,
        criterion: Criterion | None,
        objective: Objective | Mapping[str, Objective],
        schedule: Schedule,
        stateful: dict[str, Any],
        plans_itself: bool,
        by_hand: bool,
        ranks: Alone,
    ) -> None:
        self.choice, self.device = choice, choice.device
        self.model, self.objectives, self.subject = subject.model, subject.objectives, subject
        self.criterion, self.objective = criterion, objective  # as the person gave them
        self.schedule, self.stateful = schedule, stateful
        self.modes = OptimizerModes(self.optimizers)
        self.plans_itself = plans_itself  # the person leaves the plan to the loop
        self.by_hand = by_hand  # the plan that is carried out is the person's
        self.ranks = ranks
        self.tuner = Tuner(subject, self, asked=plans_itself)
        advice, single = advice_on_loss(begin), len(self.objectives) == 1
        self.watch = Watch(self.device, single=single, advice=advice, heard=self.tuner.heard)
        self.stretches = Stretches()
        self.memory = OutOfMemory(
            subject.modules,
            self.device,
            most=begin.micro_batch,
            relieve=lambda: self.step.relieve(),  # noqa: PLW0108  # whichever step that is then
            told=self._tell_of_memory,
            witness=self._witness,
            grows=ranks.may_repeat,  # a try that fails in a backward pass would end the run of all ranks
        )
        self.evaluation = Evaluation(self.model, self.device, begin.split)
        self.stream: Stream[Any] | None = None
        self.given: Any = None  # the batch that `batches` gave out last
        self._reconsidered = 0  # batches, at which it is asked again whether a loop by hand goes on for long enough
        self.is_one_by_one = False  # whether `fit` is told of each step, so that several in one graph are not used
        self.expected: int | None = None  # batches of the run, where `fit` knows them
        self.seen_before: dict[str, Any] | None = None  # of an epoch that is resumed, until it has begun
        self.changes: Changes | None = None  # since the first run that was saved
        self.epoch = 0  # of the data, from 1 once it has begun
        self._modes: list[bool] = []  # of the layers, in the last epoch
        self._transforming: tuple[Transform, PassSnapshot] | None = None  # the latest transform, and what it changes
        self.step = self.step_for(begin)
        displace_plans(self.model, self.optimizers)  # of earlier loops
        self.subject.exchange(None, self.step)
        self.plans: list[PlanChange] = []  # that were carried out, in their order
        self.noted: tuple[Plan, int | None] = (begin, None)  # the last of them: of the step, and the micro-batches
        self.journal("to begin with")

    @property
    def optimizers(self) -> list[Optimizer]:
        return [optimizer for each in self.objectives for optimizer in each.optimizers]

    @property
    def plan(self) -> Plan:
        """The plan in use; `micro_batch` is the size of micro-batches where batches do not fit whole."""
        plan, limit = self.step.plan, self.memory.portion.limit
        return plan if limit == plan.micro_batch else replace(plan, micro_batch=limit)

    # Epochs

    def batches(self, loader: Iterable[Any], transform: Transform | None) -> Iterator[Any]:
        """One epoch of `loader`, each batch already on the device."""
        loader = self.ranks.share(loader)
        self._begin_epoch(loader)
        assert self.stream is not None
        batch = None
        try:
            for given in self.stream:
                batch = given if transform is None else self._transformed(transform, given)
                if self.watch.batches >= self.tuner.due:
                    self._before_step(loader, transform, batch)
                self.given = batch
                yield batch
        except GeneratorExit:  # the person has left the loop
            self.given = None if self.given is batch else self.given
            raise
        self._end_epoch()

    def work(self, loader: Iterable[Any], transform: Transform | None) -> Iterator[Work]:
        """The same for `fit`; trains on several batches in one CUDA graph where it can."""
        stream = self.stream = self.stream_of(loader)
        if (resident := stream.resident) is None:
            for batch in self.batches(loader, transform):
                yield batch, 1, self.step.weighing.items_in(batch)
            return
        self._begin_epoch(loader)
        draws = stretches(resident.draws(), lambda: self._stretch_size(resident))
        for number, drawn in ((stream.first + number, drawn) for number, drawn in draws):
            if len(drawn) > 1 and self.watch.batches >= self.tuner.due:
                self._before_step(loader, transform, None, drawn, resident)
            origins = [resident.origin(number + i, each) for i, each in enumerate(drawn)]
            several = len(drawn) > 1
            stretch = self.stretches.of(self.step.captured, resident, drawn, transform) if several else None
            if stretch is not None:
                losses = stretch.run(drawn, self.schedule if self.schedule.schedulers else None)
                if losses is not None:
                    self.watch.see_stretch(stretch.names, (losses,), stretch.batch, origins)
                    yield None, len(drawn), len(drawn) * stretch.batch
                    continue
            for stream.origin, each in zip(origins, drawn, strict=True):
                batch = resident.batch(each)
                if transform is not None:
                    batch = self._transformed(transform, batch)
                if len(drawn) == 1 and self.watch.batches >= self.tuner.due:
                    self._before_step(loader, transform, batch, drawn, resident)
                self.given = batch
                yield batch, 1, self.step.weighing.items_in(batch)
        if not self.watch.items_seen:
            raise nothing_came(loader)
        self._end_epoch()

    def _stretch_size(self, resident: Resident) -> int:
        return 1 if self.is_one_by_one else self.stretches.size(self.step.captured, resident)

    def _begin_epoch(self, loader: Iterable[Any]) -> None:
        self.hold(alone=True)
        self.stream = self.stream_of(loader)
        self.ranks.begin_epoch(self.stream)
        self.epoch += 1
        self.watch.begin_epoch(self.epoch, self.stream)
        set_training(self.model, goes_on=self.seen_before is not None)
        if self.seen_before is not None:
            self.watch.load_state_dict(self.seen_before)
            self.seen_before = None
        if self.expected is None:  # else `fit` knows the whole
            self.tuner.begin()
        self.modes.train()
        modes = [module.training for module in self.model.modules()]
        if modes != self._modes:
            self._modes = modes
            self.memory.snapshot.look_again()  # layers that were frozen may write to their buffers now
        if self.step.captured is not None:
            self.step.captured.check()

    def _end_epoch(self) -> None:
        self.given = None
        self.tuner.pause()
        self.step.end_epoch()
        if self.step.captured is not None:
            self.step.captured.audit()
        self.schedule.after_epoch()
        self.modes.eval()

    def rest(self) -> None:
        """End idle workers after the last epoch of a fit."""
        self.given = None
        self.modes.eval()
        self.end_workers()
        self.give_back()

    def end_workers(self) -> None:
        """End those that wait for another epoch."""
        if self.stream is not None:
            self.stream.close()

    def give_back(self) -> None:
        """Revert the plan between fits, when the person may flatten weights by `.view`, script or copy the model.

        On a GPU the plan stays: captures and compiled code would be lost with it.
        """
        levers = self.step.levers
        if self.plans_itself and self.device.type == "cpu" and levers.plan.compile == "off" and not levers.is_displaced:
            levers.displace()

    def _transformed(self, transform: Transform, batch: Any) -> Any:
        """Transform a batch; where memory runs out, again after memory was freed."""
        if self.tuner.first.left:
            return self.tuner.first.watch({"device_transform": transform}, partial(transform, batch))
        if self._transforming is None or self._transforming[0] is not transform:
            held = look({"device_transform": transform}).generators
            self._transforming = (transform, PassSnapshot([], self.device, held))
        snapshot = self._transforming[1]
        for attempt in range(1, ATTEMPTS + 1):
            snapshot.take(batch)
            try:
                changed = self.stretches.transformed(transform, batch, self.step.captured)
            except Exception as error:
                if not is_out_of_memory(error) or attempt == ATTEMPTS:
                    raise
            else:
                if snapshot.is_looking:
                    snapshot.learn()
                return changed
            snapshot.restore()
            self.step.forget_captures()  # they hold memory
            clear(self.device)
        raise AssertionError  # the last attempt returns or raises

    def stream_of(self, loader: Iterable[Any]) -> Stream[Any]:
        """The stream of a loader; the same one for the same loader, so that persistent workers persist."""
        plan, now = self.plan, self.stream
        # The tuner found, now or in the run whose file this is, that data may live on the device; another's may not.
        kind = "auto" if plan.stream == "resident" and not self.by_hand else plan.stream
        asked = (kind, plan.pinned, plan.workers)
        if now is None or now.loader is not loader or now.asked != asked or not now.is_current:
            return Stream(loader, self.device, kind, pinned=plan.pinned, workers=plan.workers)
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
            self._left(loader),
            self.step.is_between_windows,
            can_be_several=resident is not None and not self.is_one_by_one and not self.subject.on_ranks,
            sample=partial(self._sample, resident, drawn[0], transform),
        )
        self.tuner.before(ahead, self.watch.batches)

    def before_step_by_hand(self, batch: Any) -> None:
        """Before a step on a batch that `batches` did not give out.

        The person may have changed anything since the step before, and how many are to come nobody knows: as many as
        there were so far. A plan is not looked for where it, or the trial of it, could be felt.
        """
        if self.step.captured is not None:
            self.step.captured.check_step()
        done = self.watch.batches
        if done >= self._reconsidered:
            self._reconsidered = done + 1 + done // 8
            self.tuner.begin()
        if done >= max(self.tuner.due, UNTIMED) and self._may_tune():
            ahead = Ahead(None, None, batch, 1, done, self.step.is_between_windows, False, lambda: batch)
            self.tuner.before(ahead, done)

    def _may_tune(self) -> bool:
        """Whether a plan may be tried at a step by hand: no other loop's is applied, and nothing special is around."""
        if self.subject.on_ranks or self.expected is not None or not self.step.levers.is_alone():
            return False
        return settings_around(self.device)[:2] == (True, False) and is_ordinary_stream(self.device)

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
        before = RngStates(self.device, generators_in([transform]))
        try:
            return transform(batch)
        finally:
            before.restore()

    def _left(self, loader: Iterable[Any]) -> int | None:
        """Batches that remain: of this fit, or without one as many epochs as there were so far."""
        if self.expected is not None:
            return self.expected - self.watch.batches
        length = length_of(loader)
        return None if length is None else length * self.epoch

    # Plans

    def step_for(self, plan: Plan, compiled: dict[str, CompiledObjective] | None = None) -> TrainingStep:
        """The step of a plan, with objectives that are compiled already where given."""
        return TrainingStep(
            self.model,
            self.objectives,
            plan,
            averages=self.subject.averages,
            see=self.watch.see,
            after_update=self.schedule.after_update if self.schedule.schedulers else None,
            compiled=compiled,
            memory=self.memory,
            across=self.ranks.across,
            wrapper=self.ranks.wrapper,
            roots=self.roots,
            rescue=self.tuner.rescued if self.watch.is_in_time and self.tuner.rounds(plan) else None,
        )

    def carry_out(self, plan: Plan, why: str, compiled: dict[str, CompiledObjective] | None = None) -> None:
        """Switch to a plan of the tuner, with objectives that are compiled already where given."""
        self.by_hand = False
        if plan == self.step.plan and compiled is None:
            return
        if self.step.goes_on_as(plan):
            self.journal(why)
        else:
            self.exchange(self.step_for(plan, compiled), why)

    @contextmanager
    def as_written(self) -> Iterator[TrainingStep]:
        """The step as the person wrote it, for a pass or two; captures stay.

        With captures or compiled code the levers stay applied. Else they are reverted: in fp32 cuDNN has chosen its
        algorithms for the original memory format, and would take seconds for another.
        """
        plain = TrainingStep(self.model, self.objectives, self.subject.plan, averages=self.subject.averages)
        if self.step.plan.compile != "off" and self.device.type == "cuda":
            with torch.compiler.set_stance("force_eager"):
                yield plain
        elif self.memory.has_captures():
            yield plain
        else:
            with self.unplanned():
                yield plain

    @contextmanager
    def trying(self, plan: Plan) -> Iterator[TrainingStep]:
        """The step of another plan, for a pass or two."""
        step = TrainingStep(self.model, self.objectives, plan, averages=self.subject.averages)
        self.subject.exchange(self.step, step)
        try:
            yield step
        finally:
            self.subject.exchange(step, self.step)

    def resume_plan(self, plan: Plan) -> None:
        """Carry out the plan of a checkpoint where the loop chooses its plan."""
        if self.plans_itself and torch.device(plan.device).type == self.device.type and plan != self.step.plan:
            self.exchange(self.step_for(replace(plan, device=str(self.device))), "that of the checkpoint")

    def exchange(self, new: TrainingStep, why: str) -> None:
        """Switch to another step."""
        new.take_over(self.step)
        try:
            self.subject.exchange(self.step, new)
        except BaseException:  # out of memory, for one
            self.subject.exchange(new, self.step)
            self.step.answer_for_memory()
            raise
        self.step = new
        self.journal(why)

    def hold(self, *, alone: bool = False) -> None:
        """Apply this plan again where another loop was built on the same model since.

        `alone`: revert the other loop's plan; else both stay applied, for loops that take turns.
        """
        if self.step.levers.is_displaced:
            self.step.forget_captures()
            if alone:
                displace_plans(self.model, self.optimizers)
            self.subject.exchange(None, self.step)

    @contextmanager
    def unplanned(self) -> Iterator[None]:
        """The model and the optimizers with the levers of the plan reverted, for trials."""
        if self.step.levers.is_displaced:  # and stays so: between fits, or until this loop goes on
            displace_plans(self.model, self.optimizers)
            yield
            return
        self.subject.exchange(self.step, None)
        try:
            yield
        finally:
            self.step.forget_captures()
            self.subject.exchange(None, self.step)

    # What is noted and told

    def journal(self, why: str, *, batch: int | None = None) -> None:
        """Note the plan in use from the next batch on, or from the one with the number `batch`."""
        noted = (self.step.plan, self.memory.portion.limit)
        if not self.plans or noted != self.noted:
            at = self.watch.batches if batch is None else batch
            done = at < self.watch.batches and self.step.is_between_windows  # the batch, and an update with it
            step = max(0, self.step.counts.steps - len(self.objectives) * done)
            plan = {k: list(v) if isinstance(v, tuple) else v for k, v in self.plan.to_json().items()}  # as JSON has it
            self.plans.append(PlanChange(step, at, plan, why))
        self.noted = noted

    def after_step(self) -> None:
        """Note and report changes that the step made to its plan: no captures, other micro-batches."""
        (plan, limit), now = self.noted, self.memory.portion.limit
        if self.step.plan != plan:
            self.journal(
                self.step.obstacle or "the step was changed while it ran", batch=max(0, self.watch.batches - 1)
            )
        elif now != limit and (now is None or (limit is not None and now > limit)):
            self.journal("larger micro-batches are tried")  # with the next batch
        elif now != limit:
            self.journal("memory ran out", batch=max(0, self.watch.batches - 1))
        if (why := self.step.obstacle) is not None:
            self.step.obstacle = None
            self.tuner.refused(why)
            if not self.plans_itself:
                warnings.warn(f"the step is not captured as a CUDA graph: {why}", PlanWarning, stacklevel=3)

    def where(self) -> str:
        """The present batch, in words."""
        origin = self.stream.origin if self.stream else None
        if origin is None:
            return f"the batch of step {self.watch.batches + 1}"
        return f"batch {origin.number} of epoch {self.epoch}"

    def forward(self, batch: Any) -> None:
        """The forward passes alone, to explain an error in one."""
        for each in self.objectives:
            each.objective(self.model, batch)

    def roots(self, more: Mapping[str, object] | None = None) -> dict[str, object]:
        """Objects from which the present step may reach Python state, by the names that a person knows."""
        return self.subject.roots(more, self.given)

    def _witness(self) -> Callable[[], list[str]]:
        """Call before a step is repeated; the returned function, called after, names what the person's code changed."""
        return watched_changes(self.roots(), counted_per_call)

    def _tell_of_memory(self, failed: int, follows: int) -> None:
        """Warn once that batches do not fit, and how training continues."""
        split = self.step.plan.split
        if self.memory.portion.cuts == 1 and split != "off":
            words = memory_words(self.model, failed, follows, exact=split != "items")
            warnings.warn(words, MemoryWarning, stacklevel=2)


def modules_of(model: nn.Module, criterion: object) -> list[nn.Module]:
    """The model, and a criterion that is a module."""
    return [model, *([criterion] if isinstance(criterion, nn.Module) else [])]


def set_training(model: nn.Module, *, goes_on: bool) -> None:
    """Training mode for an epoch: a model as it comes from a hub gets it; layers that were frozen one by one stay so.

    A module with a `train` of its own is asked in each epoch, as in a loop by hand: it may freeze layers there. Not
    where the epoch `goes_on` from a checkpoint, which has the modes of all layers.
    """
    if not model.training:
        model.train()
        return
    for module in () if goes_on else model.modules():  # parents first
        if module.training and getattr(module.train, "__func__", None) is not nn.Module.train:
            module.train()
