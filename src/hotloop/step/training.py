"""`TrainingStep`: composes the step of a plan from the eager step and its wrappers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.levers import uncaptured
from hotloop.levers.applied import AppliedPlan
from hotloop.levers.checkpointing import repeated_blocks
from hotloop.objective.objectives import Objective
from hotloop.objective.weighing import LATER, Weighing
from hotloop.plan import Plan
from hotloop.step.captured import CapturedStep
from hotloop.step.compilation import CompiledObjective
from hotloop.step.eager import Counts, EagerStep, Parts, See
from hotloop.step.eager_calls import Call, EagerCalls, called_inside
from hotloop.step.inspection import Inspection, host_noted
from hotloop.step.retry import OomRetry, OutOfMemory
from hotloop.step.sharding import is_sharded
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.step.window import AgreedWeights, Window
from hotloop.values.saved import Amount, Count, HasState, Saved
from hotloop.values.snapshot import Gradients, PassSnapshot

if TYPE_CHECKING:
    from hotloop.step.across import AcrossRanks


class TrainingStep(HasState):
    """Trains on batches as a plan says: `run(batch)` is one step and returns the losses by name.

    `memory`: repeats a batch in micro-batches where memory runs out; None: that is an error, as in a trial.
    `across` puts an objective onto several ranks; `wrapper` is called in the model's place. `averages`: losses are
    means over items, not sums. `roots`: from where the person's code may reach Python state, if its calls are watched.
    `rescue(run, batch)` is called in place of `run(batch)`. `obstacle` says why a CUDA graph that the plan has is not
    there.
    """

    run: Callable[[Any], Parts]
    name = "loop.update"
    steps: Saved[Count]
    skipped: Saved[Count]
    scalers: Saved[dict[str, dict[str, Amount]]]  # by objective
    across: Saved[dict[str, AgreedWeights]]
    windows: Saved[Count]  # that have begun, where not every batch trains all objectives
    losses: Saved[dict[str, Tensor]]  # there the last of each

    def __init__(
        self,
        model: nn.Module,
        objectives: tuple[TrainedObjective, ...],
        plan: Plan,
        *,
        averages: bool = True,
        see: See | None = None,
        after_update: Callable[[TrainedObjective], None] | None = None,
        compiled: dict[str, CompiledObjective] | None = None,
        memory: OutOfMemory | None = None,
        across: "Callable[[TrainedObjective, Objective], AcrossRanks] | None" = None,
        wrapper: nn.Module | None = None,
        roots: Callable[[], Mapping[str, object]] | None = None,
        rescue: Callable[[Callable[[Any], Parts], Any], Parts] | None = None,
    ) -> None:
        self.obstacle: str | None = None
        if plan.graph and any(each.every > 1 for each in objectives):
            plan, self.obstacle = uncaptured(plan), "not every objective is trained on every batch"
        self.model, self.objectives, self.plan, self.memory = model, objectives, plan, memory
        self.device = torch.device(plan.device)
        self.captured: CapturedStep | None = None
        self.counts = Counts()
        # A comparison blocks, which ends a capture: there, only first cuts are compared.
        later = () if plan.graph else LATER
        self.weighing = Weighing(
            plan.split,
            sums=not averages,
            later=later,
            compiles=plan.compile != "off",
            on_ranks=across is not None,
            may_probe=across is None or not is_sharded(model),  # a pass of one rank alone would wait for the others
            roots=roots,
        )
        self.compiled = compiled or {}
        if plan.compile != "off" and not compiled:
            self.compiled = {each.name: CompiledObjective(each.objective, plan.compile) for each in objectives}
        self._see, self._after_update, self._across, self._rescue = see, after_update, across, rescue
        self._called = wrapper or model
        self.eagers = [self._eager(each) for each in objectives]
        self._retries: list[OomRetry[Parts]] = []
        self.answer_for_memory()
        if memory is not None:
            self._retries = [OomRetry(eager, memory, self.weighing.items_in, eager.undo) for eager in self.eagers]
        self._alternating = Alternating(self.eagers, see, self.device)  # one for all: the plan may change while it runs
        self.levers = AppliedPlan(plan, model, self.optimizers)
        self._compose()

    def answer_for_memory(self) -> None:
        """Give OOM retry the optimizers and captures of this step; call it on the step in use."""
        if self.memory is not None:
            self.memory.serve(
                self.optimizers, lambda: self.captured is not None and self.captured.has_captures, self._give_way
            )

    def __call__(self, batch: Any) -> Parts:
        """Call `run`, which a change of plan may replace."""
        return self.run(batch)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return [optimizer for each in self.objectives for optimizer in each.optimizers]

    def _compose(self) -> None:
        """From the inside: eager steps, the switches of levers, OOM retry, objectives that alternate, CUDA graphs."""
        calls: Sequence[EagerStep | Switched] = self.eagers
        if self.levers.acts_on_steps:
            calls = [Switched(eager, self.levers) for eager in self.eagers]
        for retry, call in zip(self._retries, calls, strict=False):
            retry.call = call
        steps: Sequence[Callable[[Any], Parts]] = self._retries or calls
        self._alternating.steps = steps
        self.run = steps[0] if len(steps) == 1 else self._alternating
        self.forget_captures()
        self.captured = None
        if self.plan.graph:
            eager = EagerCalls(
                self.model, self.eagers, calls, self.run, self.levers, self.memory, self._see, self._after_update
            )
            self.run = self.captured = CapturedStep(eager, self._abandon_captures)
        if self._rescue is not None:
            self.run = partial(self._rescue, self.run)

    def _eager(self, each: TrainedObjective) -> EagerStep:
        objective: Objective = self.compiled.get(each.name, each.objective)
        across = None if self._across is None else self._across(each, objective)
        return EagerStep(
            self._called,
            each,
            self.plan,
            self.weighing,
            self.counts,
            is_alone=len(self.objectives) == 1,
            see=self._see,
            after_update=self._after_update,
            memory=self.memory,
            across=across,
            objective=objective,
        )

    def _give_way(self) -> None:
        """Drop captures, which hold memory, before a batch is repeated."""
        if self.captured is not None and self.captured.has_captures:
            self.captured.forget()
        for compiled in self.compiled.values():
            compiled.begin_anew()  # with micro-batches of another size

    def change(self, plan: Plan) -> None:
        """Switch to a plan that differs in levers or CUDA graphs."""
        self.levers.revert()
        self.plan = plan
        self.levers = AppliedPlan(self.plan, self.model, self.optimizers)
        self.levers.apply()
        self._compose()

    def _abandon_captures(self, why: str) -> None:
        """Go on without CUDA graphs."""
        self.obstacle = why or None
        self.change(uncaptured(self.plan))

    def relieve(self) -> bool:
        """Turn activation checkpointing on where a single item does not fit; returns whether that changes anything."""
        if self.plan.checkpointing or not repeated_blocks(self.model):
            return False
        self.change(replace(self.plan, checkpointing=True))
        return True

    def gradients_of(
        self, batch: Any, memory: OutOfMemory, seen: Inspection | None = None
    ) -> tuple[Parts, list[Tensor | None]]:
        """The losses of a batch and their gradients, as this step computes them; the state is restored.

        Each objective starts from the present weights. `memory` is the loop's OOM retry; `seen` gets what the passes
        do on the host.
        """
        plan = replace(self.plan, accumulate=1, clip_norm=None, clip_value=None, micro_batch=None, graph=0)
        every = list(dict.fromkeys(p for each in self.objectives for p in each.parameters))
        size = memory.portion.size_for(self.weighing.items_in(batch))
        held = Gradients(every)
        parts: Parts = {}
        found: list[Tensor | None] = []
        for each in self.objectives:
            for parameter in every:
                parameter.grad = None
            before = PassSnapshot(memory.modules, self.device, weights=memory.snapshot.weights)
            before.take(batch)
            objective: Objective = self.compiled.get(each.name, each.objective)
            if seen is not None:
                objective = partial(called_inside, partial(host_noted, self.device, seen), objective)
            alone = len(self.objectives) == 1
            eager = EagerStep(
                self.model, each, plan, self.weighing, Counts(), is_alone=alone, updates=False, objective=objective
            )
            try:
                parts |= Switched(eager, self.levers)(batch, size)
                found += [p.grad for p in each.parameters]
            finally:
                before.restore()
                held.restore()
        return parts, found

    def goes_on_as(self, plan: Plan) -> bool:
        """Keep captures under a plan that differs only in its data, or in how many steps a CUDA graph has.

        The inspection of one step holds for several in a graph. Returns whether the plan is such a one.
        """
        several = self.plan.graph and plan.graph > 1
        same = replace(plan, stream=self.plan.stream, pinned=self.plan.pinned, workers=self.plan.workers)
        if self.plan != (replace(same, graph=self.plan.graph) if several else same):
            return False
        self.plan = self.levers.plan = plan
        return True

    def forget_captures(self) -> None:
        """Drop CUDA graphs and their memory; the next steps capture them again."""
        if self.captured is not None:
            self.captured.forget()

    # Windows and counts

    @property
    def is_between_windows(self) -> bool:
        """Whether no gradient waits for its update."""
        first, *others = self.eagers
        return first.phase[0] and (not others or all(eager.phase[0] for eager in others))

    def end_epoch(self) -> None:
        """Update with the windows that the end of the epoch cuts short."""
        for eager in self.eagers:
            if eager.window.batches:
                eager.update()
        self.share_buffers()

    def share_buffers(self) -> None:
        """Give the buffers of rank 0 to all ranks."""
        if (across := self.eagers[0].across) is not None:
            across.share_buffers()

    def drop_window(self) -> None:
        """Drop the gradients of a window that is not full, and begin a new one."""
        for eager in self.eagers:
            eager.window = Window()

    def take_over(self, other: "TrainingStep") -> None:
        """Take the counts of another step, between two windows, and its loss scales where both have them."""
        self.counts.set(other.counts.steps, other.counts.skipped)
        if self.plan.split == other.plan.split:
            self.weighing.take_over(other.weighing)
        self._alternating.load_state_dict(other._alternating.state_dict())
        theirs = {eager.trained.name: eager.scaler for eager in other.eagers}
        for eager in self.eagers:
            if eager.scaler.is_enabled() and theirs[eager.trained.name].is_enabled():
                eager.scaler = theirs[eager.trained.name]

    def state_dict(self) -> dict[str, Any]:
        """Counts, loss scales and what ranks have agreed on, between two windows."""
        return {
            "steps": self.counts.steps,
            "skipped": self.counts.skipped,
            "scalers": {e.trained.name: e.scaler.state_dict() for e in self.eagers if e.scaler.is_enabled()},
            "across": {e.trained.name: e.across.agreement.to_json() for e in self.eagers if e.across is not None},
            **self._alternating.state_dict(),
        }

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Load a `state_dict`; gradients of an unfinished window are dropped."""
        undo.callback(self._set_state, self.state_dict())
        self._set_state(state)

    def _set_state(self, state: Mapping[str, Any]) -> None:
        self.counts.set(state["steps"], state["skipped"])
        self._alternating.load_state_dict(state)
        for eager in self.eagers:
            eager.begin()
            if eager.scaler.is_enabled() and eager.trained.name in state["scalers"]:
                eager.scaler.load_state_dict(state["scalers"][eager.trained.name])
            if eager.across is not None and (agreed := state["across"].get(eager.trained.name)) is not None:
                there, here = AgreedWeights.from_json(agreed), AgreedWeights(eager.across.ranks.size)
                # Another number of ranks has batches of other sizes, and agrees anew.
                eager.across.agreement = there if there.ranks == here.ranks else here


class Switched:
    """An eager step inside PyTorch's flags and with the memory format of the plan."""

    def __init__(self, step: Call, levers: AppliedPlan) -> None:
        self._step, self._levers = step, levers

    def __call__(self, batch: Any, size: int | None = None) -> Parts:
        with self._levers.around():
            return self._step(self._levers.inputs(batch), size)


class Alternating:
    """Several objectives in turn on one batch, as in a GAN; `see` gets all losses with the last.

    An objective that is not trained on every batch takes part in the first of `every` accumulation windows; in the
    others its last loss stands.
    """

    def __init__(self, eagers: Sequence[EagerStep], see: See | None, device: torch.device) -> None:
        self.steps: Sequence[Callable[[Any], Parts]] = ()
        self._eagers, self._see, self._device = eagers, see, device
        self._varies = any(eager.trained.every > 1 for eager in eagers)
        self._windows = 0  # that have begun
        self._losses: Parts = {}  # the last of each objective
        self._parts: Parts = {}
        self._is_last = True
        if len(eagers) > 1:
            for eager in eagers:
                eager.see = self._collect

    def __call__(self, batch: Any) -> Parts:
        steps, begins = self.steps, False
        if self._varies:
            begins = all(eager.phase[0] for eager in self._eagers)
            window = self._windows - (not begins)
            pairs = zip(self._eagers, self.steps, strict=True)
            steps = [step for eager, step in pairs if window % eager.trained.every == 0]
        self._parts, last = dict(self._losses), steps[-1]
        for step in steps:
            self._is_last = step is last
            step(batch)
        if self._varies:
            self._windows, self._losses = self._windows + begins, self._parts
        return self._parts

    def _collect(self, parts: Parts, count: int | Tensor) -> None:
        self._parts = {**self._parts, **parts}
        if self._is_last and self._see is not None:
            self._see(self._parts, count)

    def state_dict(self) -> dict[str, Any]:
        """The count of windows and the last losses, where not every batch trains all objectives."""
        return {"windows": self._windows, "losses": dict(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._varies:
            self._windows = state["windows"]
            self._losses = {name: loss.to(self._device) for name, loss in state["losses"].items()}
