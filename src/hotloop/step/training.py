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
from hotloop.step.compilation import CompiledObjective
from hotloop.step.eager import Counts, EagerStep, OneProcess, Parts, See, called_inside
from hotloop.step.eager_calls import Call, EagerCalls
from hotloop.step.inspection import Inspection, host_noted
from hotloop.step.retry import OomRetry, OutOfMemory
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.step.window import AgreedWeights
from hotloop.values.saved import Amount, Count, HasState, Saved
from hotloop.values.snapshot import Gradients, PassSnapshot

if TYPE_CHECKING:
    from hotloop.step.captured import CapturedStep


class TrainingStep:
    """Trains on batches as a plan says: `run(batch)` is one step and returns the losses by name.

    `memory`: repeats a batch in micro-batches where memory runs out; None: that is an error, as in a trial.
    `across` says what ranks do together for an objective; `wrapper` is called in the model's place. `averages`: losses
    are means over items, not sums. `roots`: from where the person's code may reach Python state, if its calls are
    watched. `rescue(run, batch)` is called in place of `run(batch)`. `obstacle` says why a CUDA graph that the plan has
    is not there.
    """

    run: Callable[[Any], Parts]

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
        across: Callable[[TrainedObjective], OneProcess] = lambda trained: OneProcess(),
        wrapper: nn.Module | None = None,
        roots: Callable[[], Mapping[str, object]] | None = None,
        rescue: Callable[[Callable[[Any], Parts], Any], Parts] | None = None,
    ) -> None:
        self.obstacle: str | None = None
        if plan.graph and any(each.every > 1 for each in objectives):
            plan, self.obstacle = uncaptured(plan), "not every objective is trained on every batch"
        self.model, self.objectives, self.plan, self.memory = model, objectives, plan, memory
        self.captured: CapturedStep | None = None
        self.counts = Counts()
        self.compiled = compiled or {}
        if plan.compile != "off" and not compiled:
            self.compiled = {each.name: CompiledObjective(each.objective, plan.compile) for each in objectives}
        together = [across(each) for each in objectives]
        self.weighing = Weighing(
            plan.split,
            sums=not averages,
            later=() if plan.graph else LATER,  # a comparison blocks, which ends a capture
            compiles=plan.compile != "off",
            on_ranks=together[0].size > 1,
            may_probe=together[0].is_whole,
            roots=roots,
        )
        self._see, self._rescue = see, rescue
        self._alternating = Alternating(objectives, see, self.device)  # one for all: the plan may change while it runs
        self.eagers = [
            EagerStep(
                wrapper or model,
                each,
                plan,
                self.weighing,
                self.counts,
                is_alone=len(objectives) == 1,
                see=see if len(objectives) == 1 else self._alternating.collect,
                after_update=after_update,
                memory=memory,
                across=ranks,
                objective=self.compiled.get(each.name),
            )
            for each, ranks in zip(objectives, together, strict=True)
        ]
        self.answer_for_memory()
        self.levers = AppliedPlan(plan, model, self.optimizers)
        self.state = UpdateState(self.counts, self.eagers, self._alternating)
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
    def device(self) -> torch.device:
        return torch.device(self.plan.device)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return [optimizer for each in self.objectives for optimizer in each.optimizers]

    def _compose(self) -> None:
        """From the inside: eager steps, the switches of levers, OOM retry, objectives that alternate, CUDA graphs."""
        calls: Sequence[Call] = self.eagers
        if self.levers.acts_on_steps:
            calls = [Switched(eager, self.levers) for eager in self.eagers]
        steps: Sequence[Callable[..., Parts]] = calls
        if (memory := self.memory) is not None:
            pairs = zip(calls, self.eagers, strict=True)
            steps = [OomRetry(call, memory, self.weighing.items_in, eager.undo) for call, eager in pairs]
        self.run = steps[0] if len(steps) == 1 else partial(self._alternating, self.eagers, steps)
        self.forget_captures()
        self.captured = None
        if self.plan.graph:
            from hotloop.step.captured import CapturedStep  # noqa: PLC0415  # for a plan with captures alone

            eager = EagerCalls(self.model, self.eagers, calls, self.run, self.levers, self.memory, self._see)
            self.run = self.captured = CapturedStep(eager, self._abandon_captures)
        if self._rescue is not None:
            self.run = partial(self._rescue, self.run)

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
            eager.end_window()
        self.share_buffers()

    def share_buffers(self) -> None:
        """Give the buffers of rank 0 to all ranks."""
        self.eagers[0].across.share_buffers()

    def drop_window(self) -> None:
        """Drop the gradients of a window that is not full, and begin a new one."""
        for eager in self.eagers:
            eager.drop_window()

    def take_over(self, other: "TrainingStep") -> None:
        """Take the counts of another step, between two windows, and its loss scales where both have them."""
        self.counts.set(other.counts.steps, other.counts.skipped)
        if self.plan.split == other.plan.split:
            self.weighing.take_over(other.weighing)
        self._alternating.load_state_dict(other._alternating.state_dict())
        theirs = {eager.trained.name: eager.update for eager in other.eagers}
        for eager in self.eagers:
            eager.update.take_over(theirs[eager.trained.name])


class UpdateState(HasState):
    """What a checkpoint holds of a step between two windows: counts, loss scales and what ranks have agreed on."""

    name = "loop.update"
    steps: Saved[Count]
    skipped: Saved[Count]
    scalers: Saved[dict[str, dict[str, Amount]]]  # by objective
    across: Saved[dict[str, AgreedWeights]]
    windows: Saved[Count]  # that have begun, where not every batch trains all objectives
    losses: Saved[dict[str, Tensor]]  # there the last of each

    def __init__(self, counts: Counts, eagers: Sequence[EagerStep], alternating: "Alternating") -> None:
        self._counts, self._eagers, self._alternating = counts, eagers, alternating

    def state_dict(self) -> dict[str, Any]:
        scalers = {eager.trained.name: eager.update.scaler for eager in self._eagers}
        agreed = {eager.trained.name: eager.across.agreement for eager in self._eagers}
        return {
            "steps": self._counts.steps,
            "skipped": self._counts.skipped,
            "scalers": {name: scaler.state_dict() for name, scaler in scalers.items() if scaler.is_enabled()},
            "across": {name: agreement.to_json() for name, agreement in agreed.items() if agreement is not None},
            **self._alternating.state_dict(),
        }

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Load a `state_dict`; gradients of an unfinished window are dropped."""
        undo.callback(self._set, self.state_dict())
        self._set(state)

    def _set(self, state: Mapping[str, Any]) -> None:
        self._counts.set(state["steps"], state["skipped"])
        self._alternating.load_state_dict(state)
        for eager in self._eagers:
            name = eager.trained.name
            eager.drop_window()
            eager.update.load_scale(state["scalers"].get(name))
            if (agreed := state["across"].get(name)) is not None:
                eager.across.resume(AgreedWeights.from_json(agreed))


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

    def __init__(self, objectives: Sequence[TrainedObjective], see: See | None, device: torch.device) -> None:
        self._see, self._device = see, device
        self._varies = any(each.every > 1 for each in objectives)
        self._windows = 0  # that have begun
        self._losses: Parts = {}  # the last of each objective
        self._parts: Parts = {}
        self._is_last = True

    def __call__(self, eagers: Sequence[EagerStep], steps: Sequence[Callable[[Any], Parts]], batch: Any) -> Parts:
        begins = False
        if self._varies:
            begins = all(eager.phase[0] for eager in eagers)
            window = self._windows - (not begins)
            pairs = zip(eagers, steps, strict=True)
            steps = [step for eager, step in pairs if window % eager.trained.every == 0]
        self._parts, last = dict(self._losses), steps[-1]
        for step in steps:
            self._is_last = step is last
            step(batch)
        if self._varies:
            self._windows, self._losses = self._windows + begins, self._parts
        return self._parts

    def collect(self, parts: Parts, count: int | Tensor) -> None:
        """Add the losses of one objective."""
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
