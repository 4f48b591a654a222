"""`Loop`: the training loop a person would write by hand, with the device, the precision and the waits looked after."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.data import Stream, length_of
from hotloop.data.origin import check_loader, nothing_came
from hotloop.device import Choice, pick
from hotloop.effects import counted_per_call, look
from hotloop.errors import BadArgument, MemoryWarning, PlanWarning
from hotloop.evaluation import Metrics, check_metrics, evaluate
from hotloop.loop.budgeting import Budgeting, budgeted
from hotloop.loop.burst import Bursts
from hotloop.loop.changes import Changes
from hotloop.loop.epoch import Transform, epoch_of
from hotloop.loop.fit import Fit
from hotloop.loop.journal import Journal, Logged
from hotloop.loop.largest import Largest, largest_batch
from hotloop.loop.looking import Memory, memory_of, profile_of
from hotloop.loop.progress import telling
from hotloop.loop.saved import checked_stateful, load_state, state_of
from hotloop.loop.saving import Saver, seconds_in
from hotloop.loop.step import Step, total
from hotloop.loop.tuner import Tuner
from hotloop.loop.tuning import ASKED, Subject, plan_of
from hotloop.loop.turns import Every, Optimizers, Schedule, Schedulers, turns_of
from hotloop.loop.watch import Watch
from hotloop.loop.words import advice_on_loss, check_that_it_can_learn, memory_words
from hotloop.memory.budget import bytes_of
from hotloop.memory.fragmentation import Fragmented
from hotloop.memory.oom import ATTEMPTS, clear, is_out_of_memory, surely
from hotloop.memory.rewind import Rewind
from hotloop.memory.survive import Survivor
from hotloop.memory.usage import usage
from hotloop.misfit import REFUSALS, explanation
from hotloop.objective import Criterion, Objective, Predict, as_objective, averages
from hotloop.objective import predict as predict_by_convention
from hotloop.placement import move, place
from hotloop.plan import Plan, Precision, Tuning
from hotloop.profiling.record import Profile
from hotloop.records import PlanChange, Report
from hotloop.state import State
from hotloop.text import an


class Loop:
    """A model in training: picks the device, moves the model there once, and carries out the plan.

    `loss` is a criterion `(output, target) → loss` for batches `(input, …, target)`. `objective` is any
    `(model, batch) → loss`; it may also return a dict of named losses, which are summed. A model that returns `.loss`
    needs neither. Several optimizers follow one objective together; as dicts with the same names, each objective
    has its own optimizer and they take turns. `stateful` names what else a checkpoint shall hold, such as an
    `AveragedModel`: anything with `state_dict` and `load_state_dict`.

    >>> model = nn.Linear(2, 1)
    >>> loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu")
    >>> for batch in loop.batches([(torch.ones(4, 2), torch.ones(4, 1))]):
    ...     loss = loop.step(batch)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        loss: Criterion | None = None,
        *,
        objective: Objective | Mapping[str, Objective] | None = None,
        device: str | torch.device | Choice | None = None,
        precision: Precision | Literal["auto"] = "auto",
        accumulate: int = 1,
        clip_norm: float | None = None,
        scheduler: Schedulers = None,
        schedule: Every = "step",
        plan: Plan | Path | str = "auto",
        stateful: Mapping[str, Any] | None = None,
    ) -> None:
        self._stateful = checked_stateful(stateful)
        self.choice = pick(plan.device if device is None and isinstance(plan, Plan) else device)
        self.device = self.choice.device
        self._criterion = loss
        self._objective = objective if isinstance(objective, Mapping) else as_objective(loss, objective)
        self._turns = turns_of(optimizer, self._objective)
        self.model = place(model, self.device, *self._optimizers)
        check_that_it_can_learn(self.model, self._turns)
        asked = {"precision": precision, "accumulate": accumulate, "clip_norm": clip_norm}
        self._subject = Subject(
            self.model,
            [self.model, *([loss] if isinstance(loss, nn.Module) else [])],
            self._turns,
            averages(loss),
            Plan(
                str(self.device), "fp32" if precision == "auto" else precision, accumulate, clip_norm, stream="direct"
            ),
            precision != "auto",
            self.choice.name or str(self.device),
        )
        begin = plan_of(plan, self._subject, asked)
        kept = {name: getattr(begin, name) for name in ASKED}
        self._subject = replace(
            self._subject,
            plan=replace(self._subject.plan, **kept),
            pinned_precision=self._subject.pinned_precision or begin.precision != "fp32",
        )
        self._by_hand = isinstance(plan, Plan)
        self._plans_itself = plan == "auto"
        self._tuner = Tuner(self._subject, self._adopt, self._plain_for_a_while, asked=plan == "auto")
        self._schedule = Schedule.of(scheduler, schedule, self._optimizers)
        self._watch = Watch(self.device, single=len(self._turns) == 1, advice=advice_on_loss(begin))
        self._bursts = Bursts()
        self._modes: list[bool] = []  # of the layers, in the last epoch
        self.budgeting: Budgeting | None = None  # how the blocks that are computed again were chosen
        self._budget_is_open = begin.memory_budget is not None and not begin.recompute
        if begin.memory_budget is not None:
            bytes_of(begin.memory_budget, usage(self.device).total)  # refused now, not in the first step
        self._survivor = Survivor(
            self._subject.modules,
            self.device,
            most=begin.micro_batch,
            relieve=self._relieve,
            told=self._tell_of_memory,
            witness=self._witness,
        )
        self._evaluating = Survivor([self.model], self.device)
        self._transforming: tuple[Transform, Rewind] | None = None  # the latest transform, and what it may change
        self._stream: Stream[Any] | None = None
        self._given: Any = None  # the batch that `batches` gave out last
        self._expected: int | None = None  # batches of the run, where `fit` knows them
        self._seen_before: dict[str, Any] | None = None  # of an epoch that is resumed, until it has begun
        self._changes: Changes | None = None  # since the first run that was saved
        self.epoch = 0  # of the data, from 1 once it has begun
        self._step = self._carry_out(self._step_for(begin))
        self._plans: list[PlanChange] = []  # that were carried out, in their order
        self._noted: tuple[Plan, int | None] = (begin, None)  # the last of them: of the step, and the micro-batches
        self._journal("to begin with")

    @property
    def plan(self) -> Plan:
        """What is carried out now; `micro_batch` is the size of pieces where batches do not fit whole."""
        plan, limit = self._step.plan, self._survivor.portion.limit
        return plan if limit == plan.micro_batch else replace(plan, micro_batch=limit)

    def __repr__(self) -> str:
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        return f"Loop({type(self.model).__name__}, {optimizers}, plan={self.plan!r}, steps={self.steps})"

    @property
    def steps(self) -> int:
        """Updates of the weights so far."""
        return self._step.update.steps

    @property
    def skipped(self) -> int:
        """Updates that the fp16 scaler skipped because the gradient overflowed."""
        return self._step.update.skipped

    @property
    def out_of_memory(self) -> int:
        """Times that memory ran out and a batch was repeated: in smaller pieces, or whole where it was `fragmented`."""
        return self._survivor.portion.failures

    @property
    def fragmented(self) -> Fragmented | None:
        """How memory lay in pieces when expandable segments were turned on; None where they were not."""
        return self._survivor.mended or self._evaluating.mended

    def batches(self, loader: Iterable[Any], *, device_transform: Transform | None = None) -> Iterator[Any]:
        """One epoch of `loader`, each batch already on the device. At its end a short window is updated too.

        `device_transform` changes each batch there, all of it at once: the place to normalise or augment.
        """
        self._begin_epoch(loader)
        assert self._stream is not None
        for given in self._stream:
            batch = given if device_transform is None else self._transformed(device_transform, given)
            if self._tuner.is_busy:
                self._before_step(loader, device_transform, batch)
            self._given = batch
            yield batch
        self._end_epoch()

    def _begin_epoch(self, loader: Iterable[Any]) -> None:
        self._stream = self._stream_of(loader)
        self.epoch += 1
        self._watch.begin_epoch(self.epoch, self._stream)
        if self._seen_before is not None:
            self._watch.go_on(self._seen_before)
            self._seen_before = None
        if self._expected is None:  # else `fit` knows the whole
            self._tuner.begin()
        if not self.model.training:
            self.model.train()  # as it comes from a hub; layers that were frozen one by one stay frozen
        modes = [module.training for module in self.model.modules()]
        if modes != self._modes:
            self._modes = modes
            self._survivor.rewind.look_again()  # layers that were frozen may write to their buffers now
        self._step.check()

    def _transformed(self, transform: Transform, batch: Any) -> Any:
        """A batch as the person's transform makes it; where memory runs out, again after room was made."""
        if self._tuner.watches:
            return self._tuner.watch({"device_transform": transform}, partial(transform, batch))
        if self._transforming is None or self._transforming[0] is not transform:
            held = look({"device_transform": transform}).generators
            self._transforming = (transform, Rewind([], self.device, held))
        rewind = self._transforming[1]
        for attempt in range(1, ATTEMPTS + 1):
            rewind.note(batch)
            try:
                changed = self._bursts.transformed(transform, batch, self._step)
            except Exception as error:
                if not is_out_of_memory(error) or attempt == ATTEMPTS:
                    raise
            else:
                rewind.settle()
                return changed
            rewind.put()
            self._step.forget()  # captures hold memory
            clear(self.device)
        raise AssertionError  # the last attempt returns or raises

    def _end_epoch(self) -> None:
        self._given = None
        for turn in self._step.update.flush():
            self._schedule.after_update(turn)
        self._step.audit()
        self._schedule.after_epoch()

    def step(self, batch: Any) -> Tensor:
        """Forward, backward and, when the window is full, update. The loss stays on the device; nothing waits."""
        if batch is not self._given:  # what `batches` gave out is there already
            batch = surely(partial(move, batch, self.device), self.device)
        if self._budget_is_open:
            self._keep_to_budget(batch)
        if self._tuner.watches:
            return self._watched(batch)
        step = self._step
        try:
            loss = step.bare(batch) if step.is_bare else total(step(batch))
        except REFUSALS as error:
            better = explanation(error, self.model, batch, self._where(), partial(self._forward, batch))
            if better is None:
                raise
            raise better from error
        if step.is_bare:  # it changes no plan
            return loss
        if step.plan is not self._noted[0] or self._survivor.portion.limit != self._noted[1]:
            self._note_plan()
        if step.obstacle is not None:
            self._told_of(step)
        return loss

    def _watched(self, batch: Any) -> Tensor:
        """A real step whose effects on the person's own objects the tuner notes."""
        self._tuner.watches, left = 0, self._tuner.watches
        try:
            return self._tuner.watch({}, partial(self.step, batch))
        finally:
            self._tuner.watches = left
            self._tuner.watched()

    def tune(
        self,
        loader: Iterable[Any],
        *,
        steps: int | None = None,
        seconds: float | None = None,
        device_transform: Transform | None = None,
        progress: bool | None = None,
    ) -> Tuning:
        """Find the plan for a run of so many `steps`, or of so many `seconds` in plain PyTorch, and carry it out.

        The levers are tried on copies of the weights, on batches of `loader`, each against the best plan so far; one is
        kept where it is faster by more than the noise, pays back what it costs within the run, and the loss stays
        that of fp32. Model, optimizers, random state and data order are left as they were. `fit` and `batches` do
        this by themselves in a run that is long enough for it.
        """
        for name, value in (("steps", steps), ("seconds", seconds)):
            if value is not None and not 0 < value < math.inf:
                raise BadArgument(f"{name}={value}", fix="give a number above 0")
        if steps is None and seconds is None:
            steps = length_of(loader)
        with telling("tuning", progress) as tell:
            return self._tuner.tune(loader, device_transform, steps=steps, seconds=seconds, tell=tell)

    @property
    def tuning(self) -> Tuning | None:
        """How the plan was found; None where none was looked for."""
        return self._tuner.tuning

    def evaluate(
        self, loader: Iterable[Any], metrics: Metrics | None = None, *, predict: Predict = predict_by_convention
    ) -> dict[str, float]:
        """Metrics and the mean loss over `loader`: inference mode, eval mode and back, one wait at the end."""
        objective = None if self._criterion is not None or isinstance(self._objective, Mapping) else self._objective
        return evaluate(
            self.model,
            loader,
            metrics,
            loss=self._criterion,
            objective=objective,
            predict=predict,
            device=self.device,
            precision=self.plan.precision,
            survivor=self._evaluating,
            split=self._step.plan.split,
        )

    def fit(
        self,
        loader: Iterable[Any],
        *,
        epochs: int = 1,
        validate: Iterable[Any] | None = None,
        metrics: Metrics | None = None,
        device_transform: Transform | None = None,
        progress: bool | None = None,
        save: str | Path | None = None,
        every: str | float = "5min",
        keep: int = 3,
        resume: bool = False,
        time_limit: str | float | None = None,
        monitor: bool = True,
        log: Logged = None,
    ) -> Report:
        """Train for `epochs`, evaluate after each one, and return what was measured.

        In a terminal a bar shows the loss, items per second and the time left; elsewhere each epoch prints a line
        (`progress=False`: nothing). Ctrl-C ends after the step that is running, with the report of what was done.

        `save` is a folder for checkpoints, written beside the training `every` so often ("30s", "5min", "1000 steps")
        and at the end; the last `keep` and the best stay. With `resume` the run goes on from the last of them, or
        begins where there is none: it ends with the weights of a run that was never stopped. Ctrl-C, SIGTERM and
        `time_limit` ("2h") save and end.

        With `monitor` the device is looked at twice a second, and the report tells what the run asked of it:
        utilisation, memory, energy, throttling. `log` takes these and the losses as they come: "tensorboard", a file
        that ends in `.jsonl`, or a `Log` of your own.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise BadArgument(f"epochs={epochs!r}", fix="give a whole number of at least 1")
        if metrics and validate is None:
            raise BadArgument("metrics= without validate=", fix="say on which data: validate=val_loader")
        if validate is not None:
            check_loader(validate, "validate=")
            if length_of(validate) == 0:
                raise nothing_came(validate, "validate=")
        check_metrics(metrics)
        self._schedule.check(metrics)
        if resume and save is None:
            raise BadArgument("resume=True without save=", fix="say where the checkpoints are: save='runs/…'")
        limit = None if time_limit is None else seconds_in(time_limit)
        length = length_of(loader)
        with nullcontext() if save is None else Saver(save, every, keep=keep, resume=resume) as saver:
            journal = Journal(self.device, lambda: self.steps, monitor=monitor, log=log)
            given = (loader, validate, device_transform)
            fit = Fit(self, self._watch, self._schedule, self._tuner, journal, saver, limit, *given)
            check = partial(self._check_length, fit, length, epochs)
            self._tuner.begin()
            try:
                if saver is not None and saver.found is not None:
                    with telling("going back to where it was", progress) as tell:
                        fit.go_on(saver.found.tree, tell, check)
                check()
                done = 0 if length is None else fit.first * length + fit.consumed
                self._expected = None if length is None else self._watch.batches + epochs * length - done
                epoch = partial(epoch_of, self, loader, device_transform)
                return fit.run(epoch, length, epochs, metrics, progress)
            finally:
                self._expected = None
                fit.close()

    def _check_length(self, fit: Fit, length: int | None, epochs: int) -> None:
        """Refuse schedulers that end before the run does."""
        if length is not None:
            updates = math.ceil(length / self.plan.accumulate)  # of an epoch, the last of which may be cut short
            made = fit.first * updates + fit.consumed // self.plan.accumulate
            self._schedule.check_length(epochs * updates - made, epochs - fit.first)

    def largest_batch(
        self,
        loader: Any,
        *,
        limit: int | None = None,
        seconds: float = 30.0,
        device_transform: Transform | None = None,
    ) -> Largest:
        """The largest batch that fits, at most `limit` items, and the one with the best throughput.

        Real steps with batches made from the first one of `loader` (or from one batch) grow and bisect for up to
        so many `seconds`. Everything that they change is put back, to the bit.
        """
        self._step.forget()  # recordings hold memory
        with self._plain_for_a_while():
            subject = replace(self._subject, plan=self._step.plan)
            return largest_batch(subject, loader, limit=limit, seconds=seconds, transform=device_transform)

    def _keep_to_budget(self, batch: Any) -> None:
        """Before the first step: choose the blocks that are computed again, so that memory stays within the budget."""
        self._budget_is_open = False
        with self._plain_for_a_while():
            plan, self.budgeting = budgeted(self._subject, self._step.plan, batch)
        self._subject = replace(self._subject, plan=replace(self._subject.plan, recompute=plan.recompute))
        self._tuner.subject = self._subject
        self._exchange(self._step_for(plan), "the budget of memory")
        if self.budgeting.missing:
            warnings.warn(str(self.budgeting), MemoryWarning, stacklevel=3)

    def memory(self, batch: Any = None) -> Memory:
        """What is allocated, reserved and held, by what; with a `batch`, also where the memory of a step goes.

        That step is a real one on copies of the weights: its peak by phase and by module, and over time. Everything is
        put back afterwards. It runs operation by operation, so a compiled step may need less.
        """
        with self._plain_for_a_while():
            given = None if batch is None else move(batch, self.device)
            return memory_of(self._subject, self._step.plan, given)

    def profile(
        self,
        loader: Iterable[Any],
        *,
        steps: int = 20,
        device_transform: Transform | None = None,
        progress: bool | None = None,
    ) -> Profile:
        """Where the time of a step goes: waiting for data, copies, gaps, compute; by your own lines.

        Real steps of the plan on batches of `loader`, after a warm-up, on copies of the weights; everything is put
        back afterwards. `hotloop profile script.py` does the same for a script that knows nothing of hotloop.
        """
        if isinstance(loader, Iterator):
            raise BadArgument(
                f"{an(type(loader).__name__)} can be read only once, so that nothing would be left to train on",
                fix="give what can be iterated again, such as a DataLoader",
            )
        plan = self._step.plan
        step = Step(
            self.model, self._turns, plan, averages=self._subject.averages, compiled=self._step.compiled or None
        )
        kind = "auto" if plan.stream == "resident" and not self._by_hand else plan.stream
        stream = Stream(loader, self.device, kind, device_transform, pinned=plan.pinned, workers=plan.workers)
        with self._plain_for_a_while(), telling("profiling", progress) as tell:
            return profile_of(self._subject, step, stream, steps, loader, tell)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how training goes on, as plain data and tensors: model, optimizers, schedulers,
        scaler, plan, rng states, and what was given as `stateful`. `fit(save=…)` also saves where the loader is.

        As with PyTorch's own, the tensors are those of the model, not copies. Gradients that wait for their update are
        not among them.
        """
        return {**state_of(self), "stateful": {name: thing.state_dict() for name, thing in self._stateful.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. What does not fit this loop is refused before anything changes."""
        load_state(self, dict(state), self._stateful)

    @property
    def is_between_windows(self) -> bool:
        """Whether no gradient waits for its update."""
        return self._step.update.phase[0]

    def _before_step(self, loader: Iterable[Any], transform: Transform | None, batch: Any) -> None:
        self._tuner.tick()
        if self._step.update.phase[0]:
            self._tuner.look(loader, transform, batch, self._left(loader))

    def _left(self, loader: Iterable[Any]) -> int | None:
        """Batches still to run: of this fit, or an epoch for each one so far."""
        if self._expected is not None:
            return self._expected - self._watch.batches
        length = length_of(loader)
        return None if length is None else length * self.epoch

    def _adopt(self, tuning: Tuning, tried: Step | None) -> None:
        """Carry out a plan that was found."""
        self._by_hand = False
        self._exchange(self._step_for(tuning.plan, tried), "it was found to be faster")

    def go_on_with(self, plan: Plan) -> None:
        """Carry out the plan of an earlier part of this run, where the person leaves that to the loop."""
        if self._plans_itself and torch.device(plan.device).type == self.device.type and plan != self._step.plan:
            self._exchange(self._step_for(replace(plan, device=str(self.device))), "that of the checkpoint")

    def _exchange(self, new: Step, why: str) -> None:
        """Carry out another step from now on."""
        old = self._step
        old.rig.release()
        if old.plan.channels_last and not new.plan.channels_last:
            self._lay_out(torch.contiguous_format)
        new.update.take_over(old.update)
        self._step = self._carry_out(new)
        self._journal(why)

    def _journal(self, why: str, *, batch: int | None = None) -> None:
        """Note the plan that is carried out from the next batch on, or from one that has the number `batch`."""
        noted = (self._step.plan, self._survivor.portion.limit)
        if not self._plans or noted != self._noted:
            at = self._watch.batches if batch is None else batch
            done = at < self._watch.batches and self.is_between_windows  # the batch, and an update with it
            step = max(0, self.steps - len(self._turns) * done)
            plan = {k: list(v) if isinstance(v, tuple) else v for k, v in self.plan.to_json().items()}  # as JSON has it
            self._plans.append(PlanChange(step, at, plan, why))
        self._noted = noted

    def _note_plan(self) -> None:
        """After a batch in which the plan changed by itself: a capture was given up, memory ran out or came back."""
        (plan, limit), now = self._noted, self._survivor.portion.limit
        if self._step.plan != plan:
            why = self._step.obstacle or "the step was changed while it ran"
        elif now is None or (limit is not None and now > limit):
            self._journal("larger micro-batches are tried")  # with the next batch
            return
        else:
            why = "memory ran out"
        self._journal(why, batch=max(0, self._watch.batches - 1))

    def _carry_out(self, step: Step) -> Step:
        """Give the model and the optimizers the form of a step's plan."""
        if step.plan.channels_last:
            self._lay_out(torch.channels_last)
        step.rig.engage()
        return step

    @contextmanager
    def _plain_for_a_while(self) -> Iterator[None]:
        """The model and the optimizers without what the plan has changed in them, for trials."""
        step = self._step
        step.rig.release()
        if step.plan.channels_last:
            self._lay_out(torch.contiguous_format)
        try:
            yield
        finally:
            step.forget()
            self._carry_out(step)

    def _lay_out(self, form: torch.memory_format) -> None:
        State.of(self._subject.modules, self._optimizers).laid_out(form).put()

    def _step_for(self, plan: Plan, tried: Step | None = None) -> Step:
        step = Step(
            self.model,
            self._turns,
            plan,
            averages=self._subject.averages,
            see=self._watch.see,
            see_one=self._watch.see_one,
            after_update=self._schedule.after_update if self._schedule.schedulers else None,
            compiled=None if tried is None else tried.compiled,
            survivor=self._survivor,
        )
        step.update.weighing.roots = self._subject.roots
        return step

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [optimizer for turn in self._turns for optimizer in turn.optimizers]

    def _forward(self, batch: Any) -> None:
        """The forward passes alone, to find out what went wrong in one."""
        for turn in self._turns:
            turn.objective(self.model, batch)

    def _where(self) -> str:
        origin = self._stream.origin if self._stream else None
        if origin is None:
            return f"the batch of step {self._watch.batches + 1}"
        return f"batch {origin.number} of epoch {self.epoch}"

    def _stream_of(self, loader: Iterable[Any]) -> Stream[Any]:
        """The same stream for the same loader, so that workers which persist between epochs do."""
        plan, now = self.plan, self._stream
        # The tuner found, now or in the run whose file this is, that data may live on the device; another's may not.
        kind = "auto" if plan.stream == "resident" and not self._by_hand else plan.stream
        if now is None or now.loader is not loader or now.asked != (kind, plan.pinned, plan.workers):
            return Stream(loader, self.device, kind, pinned=plan.pinned, workers=plan.workers)
        return now

    def _witness(self) -> Callable[[], list[str]]:
        """Called before a step is repeated; what it returns, after it: what the person's code changed, by name."""
        roots = self._subject.roots()
        before = look(roots, counted_per_call)
        return lambda: before.changes(look(roots, counted_per_call))

    def _relieve(self) -> bool:
        return self._step.relieve()

    def _tell_of_memory(self, failed: int, follows: int) -> None:
        """Say once that batches do not fit, and how training goes on."""
        split = self._step.plan.split
        if self._survivor.portion.cuts == 1 and split != "off":
            words = memory_words(self.model, failed, follows, exact=split != "items")
            warnings.warn(words, MemoryWarning, stacklevel=2)

    def _told_of(self, step: Step) -> None:
        """Say once that a part of the plan could not be carried out."""
        why, step.obstacle = step.obstacle, None
        warnings.warn(f"the step is not recorded as a CUDA graph: {why}", PlanWarning, stacklevel=3)
