"""`Step`: forward, backward and update of one batch, as a plan says: plainly, compiled, or as a CUDA graph."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.effects import ReachableState, kept_by_capture, look
from hotloop.errors import PlanWarning
from hotloop.levers import repeated_blocks
from hotloop.loop.compilation import compiled_objectives, hushed
from hotloop.loop.graph import WARM, CannotCapture, Rates, Recording, Side, side_of
from hotloop.loop.inspection import Comparison, Inspection, departure, inspected, objection, operations_of, signature
from hotloop.loop.recorded import Recorded
from hotloop.loop.rig import Rig
from hotloop.loop.survival import Passes
from hotloop.loop.turns import Turn
from hotloop.loop.update import FIRST, Update
from hotloop.memory.oom import Failure, began_with, half_updated, is_out_of_memory, is_recording
from hotloop.memory.rewind import Rewind
from hotloop.memory.survive import Survivor
from hotloop.objective import Losses, Objective, items_in, let_go, uniform
from hotloop.plan import Plan, Split
from hotloop.waits import waits

AUDIT_EVERY = 500  # replays after which an eager forward pass is compared with what was captured
STALE = 2  # times that it differed, after which nothing is captured any more
Parts = dict[str, Tensor]
Gradients = Sequence[tuple[nn.Parameter, Tensor | None]]
See = Callable[[Parts, int | Tensor], None]


class Dependent(Protocol):
    """What holds recordings of a step."""

    def drop(self) -> None: ...


class Step:
    """One step of training; `see` is told the losses of a batch before they reach the weights.

    Compiled and recorded are only batches of one form, that of the first one; others, such as the tail of an epoch,
    run as plain PyTorch does. A step is recorded after a few real ones, which are its warm-up, so nothing has to be
    rewound; it is not recorded where a recording would change what the step does, and `obstacle` says why.
    """

    def __init__(
        self,
        model: nn.Module,
        turns: tuple[Turn, ...],
        plan: Plan,
        *,
        averages: bool = True,
        see: See | None = None,
        see_one: Callable[[Tensor, int], None] | None = None,
        after_update: Callable[[Turn], None] | None = None,
        compiled: dict[str, Objective] | None = None,
        survivor: Survivor | None = None,
    ) -> None:
        self.model = model
        self.turns = turns
        self.plan = plan
        self.device = torch.device(plan.device)
        self.survivor = survivor  # repeats what ran out of memory; None: that is an error, as in a trial
        self.update = Update(turns, plan, averages)
        if survivor is not None:
            survivor.optimizers = self.optimizers
            survivor.rewind.groups = lambda: [group for o in self.optimizers for group in o.param_groups]
            survivor.has_recordings = lambda: self._recorded_any
            self.update.survives, self.update.is_tight = True, lambda: survivor.portion.is_tight
        self._passes = Passes(model, self.update, survivor, self._give_way)
        self.rig = Rig(plan, model, self.optimizers)
        self.transform: Callable[[Any], Any] | None = None  # of batches, where it is captured together with steps
        self.obstacle: str | None = None  # why there is no graph, where the plan has one
        self._see, self._see_one, self._after_update = see, see_one, after_update
        self._on_host = self.device.type == "cpu"
        self._plain = plan.compile == "off" and not plan.graph
        split: Split = "auto" if isinstance(plan.split, str) else plan.split  # else items are counted in another way
        bare = replace(plan, stream="direct", pinned=False, workers=None, fused=False, split=split) == Plan(
            plan.device, stream="direct"
        )
        self._may_be_bare = bare and survivor is not None and len(turns) == 1 and turns[0].name == "loss"
        self.is_bare = False  # whether the next step may be `bare`: not while an optimizer may run out of memory
        self.compiled = compiled or compiled_objectives(turns, plan)
        self.dependents: WeakSet[Dependent] = WeakSet()  # other recordings of this step, which go when it forgets
        self._form: Any = None  # of the batches that are compiled and recorded
        self._ran = False  # what is compiled
        self._compares = True  # whether a forward pass can be compared with the captured one
        self._audited_at = 0  # the step up to which captures are known to be what Python asks for
        self._stale = 0  # times that they were not
        self._departed = False  # whether the captured operations are others than the eager ones
        self.forget()

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return [optimizer for turn in self.turns for optimizer in turn.optimizers]

    def check(self) -> None:
        """Throw the captures away where the person has changed what they froze: modes, numbers, whole tensors."""
        if not self._recorded_any:
            return
        stood = self._stance() == self._stood
        if not stood or self._frozen.moved():
            self.forget()
        if not stood:
            self.rig.release()
            self.rig.engage()  # a state that was loaded brings settings of its own

    def audit(self) -> None:
        """While captures are in use: find numbers of the person's code that have changed since, and say which steps
        were replayed with the old ones."""
        if not self._recorded_any or self.survivor is None:
            return
        moved = self._frozen.moved()
        if moved:
            name, then, now = moved[0]
            self._tell_of_stale(self._audited_at, f"{name}={then}, which is {now} now")
            self.forget()
        self._audited_at = self.update.steps

    @property
    def audit_is_due(self) -> bool:
        """Whether a forward pass has to be compared with the captured one before the next replay."""
        return self.replays >= AUDIT_EVERY and self._recorded_any and self.survivor is not None and self.update.phase[0]

    def compare(
        self, batch: Any, transform: Callable[[Any], Any] | None = None, seen: Sequence[Inspection] = ()
    ) -> None:
        """Run a forward pass as Python asks for it now; where it is not the captured one, throw the captures away.

        Nothing that the pass changes stays. `transform` is captured with the step, and `seen` are inspections of it.
        """
        since = self._audited_at
        self.replays = 0
        self.audit()
        if not self._recorded_any or not self._compares:
            return
        assert self.survivor is not None
        comparison = Comparison(*seen[-1:], self._inspections[-1])

        def compared(objective: Objective, model: nn.Module, batch: Any) -> Any:
            with comparison:
                return objective(model, batch)

        rewind = Rewind(self.survivor.modules, self.device)
        with self._side.running() if self._side else nullcontext(), self.rig.around():
            rewind.note(batch)
            try:
                if transform is not None:
                    with comparison:
                        batch = transform(batch)
                batch = self.rig.inputs(batch)
                for turn in self.turns:
                    self._passes.forward(turn, batch, partial(compared, turn.objective))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._compares = False  # there is no room for an eager pass beside the captured one
            finally:
                rewind.put()
        if self._compares and (where := comparison.departure()):
            self._tell_of_stale(since, f"the operations of an earlier step; it does other work now: {where}")
            self.forget()

    def _tell_of_stale(self, since: int, what: str) -> None:
        first, last = since + 1, self.update.steps
        self._stale += 1
        again = "it is captured again" if self._stale < STALE else "it is not captured any more"
        warnings.warn(
            f"steps {first} to {last} may have been replayed with {what}: a CUDA graph keeps what Python had when it"
            f" was captured; {again}. To change a number while captures are used, hold it in a tensor on the device and"
            " write into that",
            PlanWarning,
            stacklevel=5,
        )
        if self._stale >= STALE:
            self._replan(graph=0)

    def check_size(self) -> None:
        """Throw the recordings away where they are for pieces of another size than what fits now."""
        if not self._is_sized:
            self.forget()

    def _stance(self) -> list[Any]:
        modules = [module.training for module in self.model.modules()]
        weights = [(p.data_ptr(), p.requires_grad) for p in self.model.parameters()]
        states = [id(value) for o in self.optimizers for state in o.state.values() for value in state.values()]
        groups = [(id(g), g.get("fused"), g.get("capturable")) for o in self.optimizers for g in o.param_groups]
        return [modules, weights, states, groups]

    def _roots(self) -> dict[str, object]:
        several = len(self.turns) > 1
        objectives = {turn.name if several else "objective": turn.objective for turn in self.turns}
        return {"model": self.model, **objectives, "device_transform": self.transform}

    def forget(self) -> None:
        """Throw the recordings away: the tensors that they were made for are no longer those of the model."""
        self.replays = 0  # since the last forward pass that was compared with the captured one
        self._compares = True  # whether there is room for one
        self._frozen = ReachableState()  # numbers that Python had when the step was captured
        self.generation = getattr(self, "generation", 0) + 1  # of recordings
        self._limit = None if self.survivor is None else self.survivor.portion.limit
        self._recorded_any: bool = False
        self._stood: list[Any] = []
        self._warmed = 0
        self._inspections: list[Inspection] = []
        self._recorded = Recorded(self)
        self._pointed: Gradients = []  # that the parameters show
        for dependent in self.dependents:
            dependent.drop()
        self._side: Side | None = side_of(self.device) if self.plan.graph else None
        self.update.keep_gradients = False

    def _give_way(self) -> None:
        """Let the recordings go: they hold memory for batches of their own."""
        if self._recorded_any:
            self.forget()

    def __call__(self, batch: Any) -> Parts:
        """Train on one batch; its losses, detached."""
        if self.plan.channels_last:
            batch = self.rig.inputs(batch)
        if self._plain:
            return self.run(batch)
        form = signature(batch)
        if self._form is None:
            self._form = form
        if form is None or form != self._form:
            if self._recorded:  # it may be part of a window that a recording has begun
                self.point(self._recorded.gradients)
            return self.run(batch)
        if not self.plan.graph:
            return self.run(batch, self.compiled)
        self.check_size()
        if self.audit_is_due:
            self.compare(batch)
        return self._recorded(batch) if self.ready else self._warm_up(batch)

    def bare(self, batch: Any) -> Tensor:  # noqa: PLR0912  # every call in here would count
        """The step of a tutorial's loop, and as little beside it as there can be: the loss of one batch, detached.

        Code that runs once in a millisecond is cold each time, so that every call in here counts.
        """
        turn, survivor = self.turns[0], self.survivor
        assert survivor is not None
        turn.clear()
        rewind = survivor.rewind
        if rewind.quiet and type(batch) is list:  # what `note` does then
            rewind.quiet -= 1
            rewind.taken, rewind.given = rewind.take(), (batch, batch[:])
        else:
            rewind.note(batch)
        loss = None
        try:
            returned = turn.objective(self.model, batch)
            loss = returned if type(returned) is Tensor and not returned.ndim else uniform(returned, batch).total
            loss.backward()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = Failure.of(error, self.device)
            loss = returned = None  # they hold what the failed pass has computed
        if loss is None:
            return self._again(batch, failure)
        if rewind.looking:
            rewind.settle()
        if loss is not returned:
            loss = self._seen(uniform(returned, batch))
        else:
            loss = let_go(loss)
            if self._see_one is not None:  # before the update: a loss that is lost never reaches the weights of a CPU
                self._see_one(loss, items_in(batch))
        try:
            for optimizer in turn.optimizers:
                optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise half_updated(error) from error
        self.update.steps += 1
        if self._after_update is not None:
            self._after_update(turn)
        return loss

    def _seen(self, losses: Losses) -> Tensor:
        """Several losses, or one that says how many items it is the mean of, after their backward pass; their sum."""
        losses.let_go()
        if self._see is not None:
            self._see(losses.parts, losses.count)
        return losses.total

    def _again(self, batch: Any, failure: Failure) -> Tensor:
        """A bare step ran out of memory: once more, in pieces."""
        assert self.survivor is not None
        self.is_bare = False
        self.survivor.lost(items_in(batch), partial(self.update.begin, self.turns[0]), failure)
        return total(self.survivor.repeated(partial(self.run, batch)))

    @property
    def ready(self) -> bool:
        """Whether the step can be recorded: it has run a few times and was seen to do the same work."""
        return self._warmed > WARM and self.plan.graph > 0

    def run(self, batch: Any, objectives: dict[str, Objective] | None = None) -> Parts:
        """The step as plain PyTorch does it, with the forward pass of these objectives where there are some."""
        with self.rig.around(), hushed() if objectives is self.compiled and not self._ran else nullcontext():
            self._ran = True
            parts, _ = self._compute(batch, objectives, self._see, again=True)
        if self._may_be_bare:
            self.is_bare = self.update.steps >= FIRST and not self.update.is_tight()
        return parts

    def _compute(
        self, batch: Any, objectives: dict[str, Objective] | None, see: See | None, *, again: bool
    ) -> tuple[Parts, int | Tensor]:
        parts: Parts = {}
        for turn in self.turns:
            objective = objectives.get(turn.name, turn.objective) if objectives else turn.objective
            losses = self._passes.learnt(turn, batch, objective, again=again)
            parts = {**parts, **losses.parts} if parts else losses.parts
            last = turn is self.turns[-1]
            if last and self._on_host and see is not None:  # a loss that is lost never reaches the weights
                see(parts, losses.count)
            updated = self.update.end_batch(turn)
            if last and not self._on_host and see is not None:
                see(parts, losses.count)
            if updated and self._after_update is not None:
                self._after_update(turn)
        return parts, losses.count

    def _warm_up(self, batch: Any) -> Parts:
        """A real step on the side, where recordings are made; two of them are looked at."""
        assert self._side is not None
        self._warmed += 1
        with self._side.running():
            if self._warmed in (WARM - 1, WARM):
                parts = self._inspected(batch)
            else:  # with rates on the device only where the person's code was seen to leave them alone
                parts = self._rehearsed(batch) if self._warmed > WARM else self.run(batch, self.compiled)
        if self._is_sized and self._warmed == WARM and (why := objection(*self._inspections)):
            self.give_up(why)
        return parts

    @property
    def _is_sized(self) -> bool:
        """Whether pieces have the size that they had before: else what was seen is not what would be recorded."""
        return self.survivor is None or self.survivor.portion.limit == self._limit

    def _rehearsed(self, batch: Any) -> Parts:
        """The whole step as it will be recorded, with rates on the device; a wait in it would spoil the recording."""
        rates = Rates(self.optimizers, 1, self.device)
        rates.send([rates.now()])
        updates = self.update.phase[1]
        after, self._after_update = self._after_update, None  # a schedule must not write to what is put back below
        try:
            with waits(self.device) as seen, rates.of_step(0):
                parts = self.run(batch, self.compiled)
        finally:
            self._after_update = after
        if updates and after is not None:
            for turn in self.turns:
                after(turn)
        if self._is_sized and len(seen):
            self.give_up(f"the host waits for the device: {seen}")
        return parts

    def _inspected(self, batch: Any) -> Parts:
        seen = Inspection()
        self._inspections.append(seen)

        def inspect(objective: Objective, model: nn.Module, batch: Any) -> Any:
            with inspected(self.device, seen):
                return objective(model, batch)

        before = look(self._roots(), kept_by_capture, hold=True)
        parts = self.run(batch, {turn.name: partial(inspect, turn.objective) for turn in self.turns})
        seen.compare(before, look(self._roots(), kept_by_capture, hold=True))
        return parts

    def want_of_memory(self, error: Exception) -> Failure | None:
        """How memory ran out in a recording; None where that is not what went wrong."""
        first = began_with(error)
        ran_out = self.survivor is not None and is_out_of_memory(first)
        return Failure.of(first, self.device) if ran_out else None

    def record_less(self, failure: Failure | None, items: int) -> bool:
        """Smaller pieces in the next recording, where there was no memory for this one; whether there can be one."""
        size = self._passes.size_of(items)
        if self.survivor is None or failure is None or size <= 1:
            return False
        self.forget()
        self.survivor.shrink(size, failure)
        return True

    def point(self, gradients: Gradients) -> None:
        """Let the parameters show the gradients that a recording writes."""
        if self._pointed is not gradients:
            self._pointed = gradients
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def recording_of(self, work: Callable[[], Any], *, afresh: bool) -> Recording:
        """Work that calls `compute_unwatched`, recorded; nothing is counted, since nothing has run.

        `afresh`: it begins with new gradients; else it goes on with those that are there.
        """
        assert self._side is not None
        self.update.keep_gradients = not afresh
        try:
            with self.update.uncounted(), self.rig.around():
                recording = Recording(work, self._side.stream)
        finally:
            self.update.keep_gradients = True
        shown = [(p, p.grad) for turn in self.turns for p in turn.parameters] if afresh else self._recorded.gradients
        recording.gradients = self._pointed = shown
        if not self._recorded_any:
            self._frozen = look(self._roots(), kept_by_capture)
            self._audited_at = self.update.steps
        self._recorded_any, self._stood = True, self._stance()
        return recording

    def replay(self, recording: Recording, steps: int = 1) -> None:
        self.replays += steps
        recording.replay()
        self.point(recording.gradients)

    def replayed(self, parts: Parts, count: int | Tensor, *, updated: bool) -> None:
        """What the host does beside a replay of one batch: note its losses, count it, advance schedules."""
        if self._see is not None:
            self._see(parts, count)
        if self.survivor is not None:
            self.survivor.portion.went_well()
        self.update.count()
        if updated and self._after_update is not None:
            for turn in self.turns:
                self._after_update(turn)

    def compute_unwatched(self, batch: Any) -> tuple[Parts, int | Tensor]:
        """The step for a recording: what the host does beside it happens at each replay."""
        after, self._after_update = self._after_update, None
        seen = Inspection()
        compares = bool(self._inspections) and not self.compiled and is_recording()

        def noted(objective: Objective, model: nn.Module, batch: Any) -> Any:
            with operations_of(seen):
                return objective(model, batch)

        objectives: dict[str, Objective] = {turn.name: partial(noted, turn.objective) for turn in self.turns}
        try:
            result = self._compute(batch, objectives if compares else self.compiled, None, again=False)
        finally:
            self._after_update = after
        if compares and (where := departure(self._inspections[-1], seen)):
            self._departs(where)
        return result

    def _departs(self, where: str) -> None:
        """The person's code does something else while it is captured, as some libraries do on purpose."""
        if torch.are_deterministic_algorithms_enabled():
            raise CannotCapture(f"it does other work while it is captured: {where}")
        if not self._departed and self.survivor is not None:
            warnings.warn(
                f"while it is captured as a CUDA graph the step does other work than eagerly, which may round otherwise"
                f" and draw other random numbers: {where}. Plan(graph=0) leaves it eager",
                PlanWarning,
                stacklevel=6,
            )
        self._departed = True

    def give_up(self, why: str) -> None:
        """Go on without a graph."""
        self.obstacle = why
        self._replan(graph=0)

    def relieve(self) -> bool:
        """Save memory where a single item does not fit: compute activations again. Whether that changes anything."""
        if self.plan.checkpointing or not repeated_blocks(self.model):
            return False
        self._replan(checkpointing=True)
        return True

    def _replan(self, **changes: Any) -> None:
        self.rig.release()
        self.plan = replace(self.plan, **changes)
        self.rig = Rig(self.plan, self.model, self.optimizers)
        self.rig.engage()
        self._plain = self.plan.compile == "off" and not self.plan.graph
        self.forget()


def total(parts: Parts) -> Tensor:
    """The loss of a batch from its parts."""
    return next(iter(parts.values())) if len(parts) == 1 else Losses(parts, 1).total
