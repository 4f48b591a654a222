"""`PlanSwitch`: the step in use, and the switch from the step of one plan to that of another."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hotloop.errors import MemoryWarning, PlanWarning
from hotloop.levers import rounding_levers
from hotloop.levers.applied import displace_plans
from hotloop.plan import Plan
from hotloop.records import PlanChange
from hotloop.run.messages import memory_words
from hotloop.run.run_ranks import Alone
from hotloop.run.schedulers import Schedule
from hotloop.run.watch import Watch
from hotloop.step.compilation import CompiledObjective
from hotloop.step.eager import Parts
from hotloop.step.retry import OutOfMemory
from hotloop.step.training import TrainingStep
from hotloop.tune.subject import Subject
from hotloop.values.reach import counted_per_call, watched_changes


class PlanSwitch:
    """Carries out one plan at a time on a model and its optimizers, and journals which.

    `given` gives the batch of the present step. `rescue(run, batch)` runs the steps of a plan that rounds beyond the
    person's; `refused` hears why a step is not captured.
    """

    def __init__(
        self,
        subject: Subject,
        begin: Plan,
        watch: Watch,
        schedule: Schedule,
        ranks: Alone,
        *,
        given: Callable[[], Any],
        rescue: Callable[[Callable[[Any], Parts], Any], Parts],
        refused: Callable[[str], None],
        plans_itself: bool,
        by_hand: bool,
    ) -> None:
        self.subject, self.ranks = subject, ranks
        self.plans_itself = plans_itself  # the person leaves the plan to the loop
        self.by_hand = by_hand  # the plan that is carried out is the person's
        self._device, self._watch, self._schedule = subject.device, watch, schedule
        self._given, self._rescue, self._refused = given, rescue, refused
        self.memory = OutOfMemory(
            subject.modules,
            subject.device,
            most=begin.micro_batch,
            relieve=lambda: self.step.relieve(),  # noqa: PLW0108  # whichever step that is then
            told=self._tell_of_memory,
            witness=self._witness,
            grows=ranks.may_repeat,  # a try that fails in a backward pass would end the run of all ranks
        )
        self.step = self.step_for(begin)
        displace_plans(subject.model, subject.optimizers)  # of earlier loops
        subject.exchange(None, self.step)
        self.plans: list[PlanChange] = []  # that were carried out, in their order
        self.noted: tuple[Plan, int | None] = (begin, None)  # the last of them: of the step, and the micro-batches
        self.note("to begin with")

    @property
    def plan(self) -> Plan:
        """The plan in use; `micro_batch` is the size of micro-batches where batches do not fit whole."""
        plan, limit = self.step.plan, self.memory.portion.limit
        return plan if limit == plan.micro_batch else replace(plan, micro_batch=limit)

    def step_for(self, plan: Plan, compiled: dict[str, CompiledObjective] | None = None) -> TrainingStep:
        """The step of a plan, with objectives that are compiled already where given."""
        return self.subject.step_for(
            plan,
            see=self._watch.see,
            after_update=self._schedule.after_update if self._schedule.schedulers else None,
            compiled=compiled,
            memory=self.memory,
            across=self.ranks.across,
            wrapper=self.ranks.wrapper,
            roots=self.roots,
            rescue=self._rescue if self._watch.is_in_time and self._rounds(plan) else None,
        )

    def _rounds(self, plan: Plan) -> bool:
        """Whether the tuner has pulled a lever that rounds losses and gradients, beyond the person's plan."""
        return not self.by_hand and bool(rounding_levers(plan, self.subject.plan))

    def carry_out(self, plan: Plan, why: str, compiled: dict[str, CompiledObjective] | None = None) -> None:
        """Switch to a plan of the tuner, with objectives that are compiled already where given."""
        self.by_hand = False
        if plan == self.step.plan and compiled is None:
            return
        if self.step.goes_on_as(plan):
            self.note(why)
        else:
            self.exchange(self.step_for(plan, compiled), why)

    def resume_plan(self, plan: Plan) -> None:
        """Carry out the plan of a checkpoint where the loop chooses its plan."""
        if self.plans_itself and plan.device.split(":")[0] == self._device.type and plan != self.step.plan:
            self.exchange(self.step_for(replace(plan, device=str(self._device))), "that of the checkpoint")

    def restorer(self) -> Callable[[], None]:
        """A callable that undoes what `resume_plan` changes, and what a step loads."""
        step, plan, counts = self.step, self.step.plan, self.step.state.state_dict()
        plans, noted = list(self.plans), self.noted

        def restore() -> None:
            if self.step.plan != plan:
                self.exchange(self.step_for(plan), "that of before")
            if self.step is not step:
                self.step.state.load_state_dict(counts)
            self.plans[:], self.noted = plans, noted

        return restore

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
        self.note(why)

    @contextmanager
    def as_written(self) -> Iterator[TrainingStep]:
        """The step as the person wrote it, for a pass or two; captures stay.

        With captures or compiled code the levers stay applied. Else they are reverted: in fp32 cuDNN has chosen its
        algorithms for the original memory format, and would take seconds for another.
        """
        plain = self.subject.step_for(self.subject.plan)
        if self.step.plan.compile != "off" and not self.subject.backend.is_host:
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
        step = self.subject.step_for(plan)
        self.subject.exchange(self.step, step)
        try:
            yield step
        finally:
            self.subject.exchange(step, self.step)

    @contextmanager
    def unplanned(self) -> Iterator[None]:
        """The model and the optimizers with the levers of the plan reverted, for trials."""
        if self.step.levers.is_displaced:  # and stays so: between fits, or until this loop goes on
            displace_plans(self.subject.model, self.subject.optimizers)
            yield
            return
        self.subject.exchange(self.step, None)
        try:
            yield
        finally:
            self.step.forget_captures()
            self.subject.exchange(None, self.step)

    def hold(self, *, alone: bool = False) -> None:
        """Apply this plan again where another loop was built on the same model since.

        `alone`: revert the other loop's plan; else both stay applied, for loops that take turns.
        """
        if self.step.levers.is_displaced:
            self.step.forget_captures()
            if alone:
                displace_plans(self.subject.model, self.subject.optimizers)
            self.subject.exchange(None, self.step)

    def give_back(self) -> None:
        """Revert the plan between fits, when the person may flatten weights by `.view`, script or copy the model.

        On a GPU the plan stays: captures and compiled code would be lost with it.
        """
        levers = self.step.levers
        if (
            self.plans_itself
            and self.subject.backend.is_host
            and levers.plan.compile == "off"
            and not levers.is_displaced
        ):
            levers.displace()

    def roots(self, more: Mapping[str, object] | None = None) -> dict[str, object]:
        """Objects from which the present step may reach Python state, by the names that a person knows."""
        return self.subject.roots(more, self._given())

    def note(self, why: str, *, batch: int | None = None) -> None:
        """Note the plan in use from the next batch on, or from the one with the number `batch`."""
        noted = (self.step.plan, self.memory.portion.limit)
        if not self.plans or noted != self.noted:
            at = self._watch.batches if batch is None else batch
            done = at < self._watch.batches and self.step.is_between_windows  # the batch, and an update with it
            step = max(0, self.step.counts.steps - len(self.subject.objectives) * done)
            plan = {k: list(v) if isinstance(v, tuple) else v for k, v in self.plan.to_json().items()}  # as JSON has it
            self.plans.append(PlanChange(step, at, plan, why))
        self.noted = noted

    def note_step(self) -> None:
        """Note and report changes that the step made to its plan: no captures, other micro-batches."""
        (plan, limit), now = self.noted, self.memory.portion.limit
        if self.step.plan != plan:
            self.note(self.step.obstacle or "the step was changed while it ran", batch=max(0, self._watch.batches - 1))
        elif now != limit and (now is None or (limit is not None and now > limit)):
            self.note("larger micro-batches are tried")  # with the next batch
        elif now != limit:
            self.note("memory ran out", batch=max(0, self._watch.batches - 1))
        if (why := self.step.obstacle) is not None:
            self.step.obstacle = None
            self._refused(why)
            if not self.plans_itself:
                warnings.warn(f"the step is not captured as a CUDA graph: {why}", PlanWarning, stacklevel=3)

    def _witness(self) -> Callable[[], list[str]]:
        """Call before a step is repeated; the returned function, called after, names what the person's code changed."""
        return watched_changes(self.roots(), counted_per_call)

    def _tell_of_memory(self, failed: int, follows: int) -> None:
        """Warn once that batches do not fit, and how training continues."""
        split = self.step.plan.split
        if self.memory.portion.cuts == 1 and split != "off":
            words = memory_words(self.subject.model, failed, follows, exact=split != "items")
            warnings.warn(words, MemoryWarning, stacklevel=2)
