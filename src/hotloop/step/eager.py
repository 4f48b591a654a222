"""The training step, once: forward, backward, accumulation, clipping and update for one objective.

Everything else in this package calls `EagerStep` and changes nothing in it: `OomRetry` calls it again in micro-batches,
`CapturedStep` captures its calls as a CUDA graph, a compiled objective takes the place of its objective.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotloop._torch import BatchNorm, unprofiled_step, version_of
from hotloop.errors import BadArgument, DoesNotFit
from hotloop.levers.flags import fused_steps
from hotloop.memory.micro_batches import check_cut, micro_batches_of
from hotloop.memory.oom import half_updated, is_out_of_memory, surely
from hotloop.objective.comparison import Probe, Verdict
from hotloop.objective.objectives import Losses, Objective, autocast, uniform
from hotloop.objective.weighing import Weighing
from hotloop.plan import Plan
from hotloop.step.guard import guarded, is_plenty
from hotloop.step.retry import OutOfMemory
from hotloop.step.trained_objectives import TrainedObjective, needs_closure, tell_of_weights_without_optimizer
from hotloop.step.window import AgreedWeights, CapturedWindow, Window
from hotloop.values.snapshot import Gradients

if TYPE_CHECKING:
    from hotloop.step.across import UpdateTimes

FIRST_UPDATES = 2  # in which an optimizer allocates what it will go on using

_NOTHING = nullcontext()

Parts = dict[str, Tensor]  # losses by name
See = Callable[[Parts, int | Tensor], None]  # (losses, items that they are means over)


@dataclass
class Counts:
    """Updates so far, of all objectives."""

    steps: int = 0
    skipped: int = 0  # by the fp16 scaler, because the gradient overflowed

    def set(self, steps: int, skipped: int) -> None:
        self.steps, self.skipped = steps, skipped


class OneProcess:
    """What a step asks of the ranks, in a process that is alone: nothing is sent. `AcrossRanks` answers for several."""

    size = 1
    is_whole = True  # whether this process has all weights: a pass, or a norm, needs no other rank
    agreement: AgreedWeights | None = None  # how ranks weigh losses
    pace: "UpdateTimes | None" = None  # where it can be told how long a rank waits for others

    def through(self, objective: Objective) -> Objective:
        """The objective as a step calls it."""
        return objective

    def synchronizing(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Context of a forward pass; the backward pass of the last one before an update reduces all gradients."""
        return _NOTHING

    def sets_aside(self, *, is_last: bool) -> bool:
        """Whether gradients of earlier batches are moved aside before a pass that may fail."""
        return True

    def undo(self, *, holds_others: bool) -> None:
        """Clean up after a pass that failed.

        `holds_others`: its gradients were added to those of earlier batches, and cannot be separated.
        """

    def weighed(self, window: Window, losses: Losses, *, is_last: bool) -> Tensor | None:
        """The loss times its weight in the window; None where it is the mean of nothing."""
        return window.weighed(losses)

    def after_backward(self, losses: Losses) -> None:
        """After the passes over a batch."""

    def finish(self, window: Window) -> None:
        """Before an update: gradients and the weight of the window become those of all ranks."""

    def share_buffers(self) -> None:
        """Broadcast the buffers of rank 0, since each rank has those of its own batches, as in batch normalisation."""

    def resume(self, agreement: AgreedWeights) -> None:
        """Go on with what ranks had agreed on when a checkpoint was taken."""


class EagerStep:
    """Trains one objective on a batch, and returns its losses, detached.

    `see` gets the losses before they reach the weights, `after_update` is called after an update. `memory` is that of
    the OOM retry around it; None: the caller handles running out of memory. Without `updates`, a call accumulates the
    gradient of its batch. `objective` is called in place of the trained one; `across` is what ranks do together.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: TrainedObjective,
        plan: Plan,
        weighing: Weighing,
        counts: Counts,
        *,
        is_alone: bool = True,
        see: See | None = None,
        after_update: Callable[[TrainedObjective], None] | None = None,
        memory: OutOfMemory | None = None,
        across: OneProcess | None = None,
        updates: bool = True,
        objective: Objective | None = None,
    ) -> None:
        self.model, self.trained, self.weighing, self.see = model, trained, weighing, see
        self.across = across or OneProcess()
        self._written = self.across.through(trained.objective)  # as the person wrote it
        self.objective = self._written if objective is None else self.across.through(objective)  # compiled or watched
        self.update = Update(
            model, trained, plan, counts, self.across, is_alone=is_alone, memory=memory, after=after_update
        )
        self._begin = 0 if updates else 1  # batches in a new window: gradients of others that are there count as one
        self.window = Window(self._begin)
        self._captured = CapturedWindow()
        self._plan, self._is_alone, self._memory = plan, is_alone, memory
        self._autocast = autocast(torch.device(plan.device), plan.precision)
        self._earlier: Gradients | None = None  # of the window, out of reach of a pass that may fail

    def __call__(self, batch: Any, size: int | None = None) -> Parts:  # noqa: PLR0912, PLR0915  # one block, read at once
        """Forward, backward and, when the window is full, update; `size`: at most so many items at once."""
        plan, trained, weighing, across = self._plan, self.trained, self.weighing, self.across
        window, scaler = self.window, self.update.scaler
        is_full = window.batches + 1 >= plan.accumulate  # with this batch: then an update follows
        if window.batches == 0:
            trained.zero_grad()
        elif self._memory is not None and across.sets_aside(is_last=is_full):
            self._earlier = Gradients(trained.parameters)
            for parameter in trained.parameters:
                parameter.grad = None  # not by a `zero_grad` of the person's, which may write zeros into what is noted
        inputs = None if self._is_alone else [p for p in trained.parameters if p.requires_grad]
        if size is None and plan.accumulate == 1 and across.size == 1:
            with self._autocast:
                losses = uniform(self.objective(self.model, batch), batch, trained.name)
            if not (losses.is_counted or isinstance(plan.split, str)):
                losses.count = weighing.items_in(batch)
            loss = losses.total
            scaler.scale(loss).backward(inputs=inputs)
            del loss
            losses.detach_parts()
        else:  # each batch or micro-batch weighs as much as its loss is the mean over
            window, joint = window.copy(), None
            items = done = weighing.items_in(batch)
            verdict = self._verdict(batch, items, size)
            whole = ((batch, items, None),)
            for part, count, weight in whole if size is None else micro_batches_of(batch, items, size, plan.split):
                done -= count
                is_last = done == 0 and is_full  # before the update
                shared = across.synchronizing(is_last=is_last)
                with self._autocast, shared, _alone(self.model, count, self._asked) if count < items else _NOTHING:
                    losses = weighing.losses(
                        verdict,
                        trained.name,
                        self.objective,
                        self._written,
                        self.model,
                        part,
                        count,
                        weight,
                        is_part=count < items,
                    )
                if plan.graph:
                    self._captured.prepare(losses)
                weighed = across.weighed(window, losses, is_last=is_last)
                if weighed is not None:
                    scaler.scale(weighed).backward(inputs=inputs)
                del weighed
                losses.detach_parts()
                joint = losses if joint is None else joint.joined_with(losses)
            assert joint is not None
            losses = joint
            across.after_backward(losses)
        if self._memory is not None and self._memory.snapshot.is_looking:  # at the passes, not at the update
            self._memory.snapshot.learn()
        if self.see is not None:  # a loss that is not finite is an error here: nothing of its batch stays
            self.see(losses.parts, losses.count)
        if self._earlier is not None:
            if self._begin:
                window.average(trained.parameters)
            if losses.first != 0:  # else nothing counted in the batch before
                self._earlier.add()
            self._earlier = None
        if self._begin:
            return losses.parts
        window.batches += 1
        self.window = window
        if window.captured is not None:
            window.captured.note(window)
        if is_full:
            self.window = Window(captured=window.captured)
            self.update(window, self._closure(batch, losses, size, inputs) if self.update.needs_closure else None)
        return losses.parts

    def _closure(
        self, batch: Any, losses: Losses, size: int | None, inputs: list[nn.Parameter] | None
    ) -> Callable[[], Tensor]:
        """A closure that computes loss and gradient of a batch again once weights have changed."""
        if size is not None:
            raise DoesNotFit(
                "a batch does not fit into the memory, and an optimizer that computes the loss itself needs all of it",
                fix="use smaller batches, bf16 or activation checkpointing",
            )
        parameters = self.trained.parameters
        first, known = losses.total, [version_of(p) for p in parameters]

        def closure() -> Tensor:
            if known == [version_of(p) for p in parameters]:
                return first
            with torch.enable_grad():
                self.trained.zero_grad()
                with self._autocast:
                    loss = uniform(self.objective(self.model, batch), batch, self.trained.name).total
                loss.backward(inputs=inputs)
            self.update.clip()
            return loss.detach()

        return closure

    @property
    def phase(self) -> tuple[bool, bool]:
        """Whether the next batch is the first of its window, and whether it is the last."""
        batches = self.window.batches
        return batches == 0, batches + 1 >= self._plan.accumulate

    def end_window(self) -> None:
        """Update with a window that the end of the epoch cuts short."""
        if self.window.batches:
            window, self.window = self.window, Window()
            self.update(window)

    def drop_window(self) -> None:
        """Begin a new window, whatever the one in progress holds."""
        self.window = Window(self._begin)

    def undo(self) -> None:
        """Restore the window and its gradients after a call that failed before its update."""
        self.across.undo(holds_others=self.window.batches > 0 and self.phase[1])
        if self._earlier is not None:
            self._earlier.restore()
            self._earlier = None
        elif self.window.batches == 0:
            self.trained.zero_grad()

    @contextmanager
    def watching(self, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Call the objective, not compiled, inside a context that watches it."""
        before = self.objective
        self.objective = self.across.through(partial(called_inside, context, self.trained.objective))
        try:
            yield
        finally:
            self.objective = before

    def forward(self, batch: Any, size: int | None = None) -> None:
        """The forward passes of a call alone, without gradients."""
        items, name, split = self.weighing.items_in(batch), self.trained.name, self._plan.split
        verdict = self.weighing.known(name, batch)
        with self._autocast:
            for part, count, weight in micro_batches_of(batch, items, size or items, split):
                if size is None and self._plan.accumulate == 1:
                    self.objective(self.model, part)
                else:
                    self.weighing.losses(
                        verdict, name, self.objective, self.trained.objective, self.model, part, count, weight
                    )

    @contextmanager
    def capturing(self, see: See) -> Iterator[None]:
        """Inside a capture nothing runs: the host counts and repeats nothing, and the losses go to `see`."""
        before = self.see, self.window, self._memory
        self.see, self.window, self._memory = see, self.window.copy(), None
        self.window.captured = self._captured
        try:
            with self.update.capturing():
                yield
        finally:
            self.see, self.window, self._memory = before

    def replayed(self, batches: int = 1, norm: Tensor | None = None) -> None:
        """Count batches that a CUDA graph has trained on; `norm` is that of the last gradient, if it has one."""
        updates, length = batches, self._plan.accumulate
        if length > 1:
            updates = 0
            for _ in range(batches):
                self._captured.add_replayed(self.window)
                if self.window.batches >= length:
                    self.window = Window()
                    updates += 1
        self.update.replayed(updates, norm)

    def _verdict(self, batch: Any, items: int, size: int | None) -> Verdict:
        """How micro-batches, or batches of a window, are weighed; raises or warns where they differ from the whole."""
        name, weighing, split = self.trained.name, self.weighing, self._plan.split
        if self._memory is None:  # a trial, or a capture: what was found before holds
            return weighing.known(name, batch)
        if size is None or size >= items:
            verdict = weighing.verdict(name, self._probe, batch, items, None)
            if self._plan.accumulate > 1:
                if verdict.differs is not None:
                    weighing.tell("differs", differs=verdict.differs)
                weighing.tell_of_norms(self.model, "batch")
            return verdict
        check_cut(self.trained.parameters, split, None, asked=self._asked)
        verdict = weighing.verdict(name, self._probe, batch, items, size)
        check_cut((), split, verdict.differs, asked=self._asked)
        if self._asked is not None or self._begin:  # else it was said when memory ran out
            weighing.tell_of_norms(self.model, "micro-batch")
        return verdict

    @property
    def _asked(self) -> int | None:
        """The size of micro-batches in the plan; None after memory ran out, when the retry decides."""
        return None if self._memory is None or self._memory.portion.failures else self._plan.micro_batch

    def _probe(self) -> Probe:
        """The `Probe` that compares the loss of a batch with those of its micro-batches."""
        criterion = getattr(self.trained.objective, "criterion", None)
        modules = [self.model, *([criterion] if isinstance(criterion, nn.Module) else [])]
        given, device = None if self._plan.precision == "fp32" else self._autocast, torch.device(self._plan.device)
        return Probe(self.trained.objective, self.model, modules, device, given, self.trained.parameters)


class Update:
    """The end of a window: averages its gradients, unscales and clips them, and calls the optimizers."""

    def __init__(
        self,
        model: nn.Module,
        trained: TrainedObjective,
        plan: Plan,
        counts: Counts,
        across: OneProcess,
        *,
        is_alone: bool,
        memory: OutOfMemory | None,
        after: Callable[[TrainedObjective], None] | None,
    ) -> None:
        self.counts = counts
        self.norm: Tensor | None = None  # of the last gradient before it was clipped, on the device
        self.needs_closure = any(map(needs_closure, trained.optimizers))
        if self.needs_closure:
            _check_closure(trained, plan, across)
        self._model, self._trained, self._plan, self._across = model, trained, plan, across
        self._device = torch.device(plan.device)
        self._is_alone, self._memory, self._after = is_alone, memory, after
        self._asks_for_norm = False  # of the next gradient, where nothing else needs it
        self._done = 0
        self._ordered: tuple[tuple[int, ...], list[nn.Parameter]] = ((), [])  # as in `model.parameters()`, by their ids
        self.renew_scale()

    def renew_scale(self) -> None:
        """Begin with a new loss scale, its tensors allocated: memory that runs out in its lazy start would break it."""
        self.scaler = torch.amp.GradScaler(self._device.type, enabled=self._plan.precision == "fp16")
        if self.scaler.is_enabled():
            self.scaler.scale(torch.zeros((), device=self._device))

    def __call__(self, window: Window, closure: Callable[[], Tensor] | None = None) -> None:  # noqa: PLR0912  # as above
        """Update with the gradients of a window.

        `closure`: for an optimizer that computes the loss again, such as LBFGS.
        """
        plan, device, scaler, optimizers = self._plan, self._device, self.scaler, self._trained.optimizers
        scales, memory = scaler.is_enabled(), self._memory
        clips = plan.clip_norm is not None or plan.clip_value is not None
        before = scaler.get_scale()
        try:  # what fails for want of memory has done nothing, so that it can be repeated
            self._across.finish(window)
            if window.is_weighed:
                window.average(self._trained.parameters)
            for optimizer in optimizers if scales and clips else ():
                surely(partial(scaler.unscale_, optimizer), device)
            if self._asks_for_norm and plan.clip_norm is None:
                self._asks_for_norm = False
                if not any(p.grad is not None and p.grad.is_sparse for p in self._trained.parameters):
                    self.norm = norm_of(self._trained.parameters, device) / (1.0 if clips else before)
            if clips and (norm := self.clip()) is not None:
                self.norm = norm
            with fused_steps(optimizers, has_scaler=scales, is_scaled=scales and not clips):
                if closure is not None:
                    optimizers[0].step(closure)  # type: ignore[arg-type]  # LBFGS calls float on it
                elif memory is not None and (
                    memory.portion.is_tight or (self._done < FIRST_UPDATES and not is_plenty(optimizers, device))
                ):
                    with guarded(optimizers):
                        for optimizer in optimizers:
                            surely(partial(scaler.step, optimizer), device)
                else:
                    for optimizer in optimizers:
                        scaler.step(optimizer) if scales else unprofiled_step(optimizer)()
            if scales:
                surely(scaler.update, device)
        except Exception as error:
            if memory is None or not is_out_of_memory(error):
                raise
            raise half_updated(error) from error
        # The public sign of a skipped step: the scale backs off. (It reads one number; the step has just read another.)
        stepped = scaler.get_scale() >= before
        self._done += 1
        if self._done == 1 and self._is_alone:
            tell_of_weights_without_optimizer(self._model, self._trained)
        self.counts.steps += stepped
        self.counts.skipped += not stepped
        if stepped and self._after is not None:
            self._after(self._trained)

    def clip(self) -> Tensor | None:
        """Clip the gradients as the plan says; returns the norm that they had, where that is clipped."""
        plan, parameters, norm = self._plan, self._trained.parameters, None
        first, *others = self._trained.optimizers
        if plan.clip_norm is not None:
            if others or len(first.param_groups) > 1:
                parameters = self._in_order(parameters)
            norm, by_dtype = norm_of(parameters, self._device), defaultdict(list)
            for parameter in parameters:
                if parameter.grad is not None:
                    by_dtype[parameter.grad.dtype].append(parameter)
            for alike in by_dtype.values():  # each all or nothing, for a retry
                surely(partial(nn.utils.clip_grads_with_norm_, alike, plan.clip_norm, norm), self._device)
        if plan.clip_value is not None:
            surely(partial(nn.utils.clip_grad_value_, parameters, plan.clip_value), self._device)
        return norm

    def _in_order(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters in the order of `model.parameters()`: in another, a norm rounds otherwise."""
        ids = tuple(map(id, parameters))
        if ids != self._ordered[0]:
            trained = set(ids)
            every = dict.fromkeys((*self._model.parameters(), *parameters))
            self._ordered = (ids, [each for each in every if id(each) in trained])
        return self._ordered[1]

    def advance_schedules(self) -> None:
        """Advance the schedules that step with each update."""
        if self._after is not None:
            self._after(self._trained)

    @contextmanager
    def without_schedules(self) -> Iterator[None]:
        """Inside the block, schedules stand still."""
        after, self._after = self._after, None
        try:
            yield
        finally:
            self._after = after

    def ask_for_norm(self) -> None:
        """Compute the norm of the next gradient, though nothing else needs it."""
        self._asks_for_norm = True

    def told_norm(self) -> Tensor | None:
        """The norm of the last gradient; where that is not clipped, only once."""
        norm = self.norm
        if self._plan.clip_norm is None:
            self.norm = None
        return norm

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside a capture nothing runs, so that nothing is counted; `norm` is that of the captured gradient."""
        before = vars(self).copy()
        self.counts, self.norm, self._memory, self._after, self._asks_for_norm = Counts(), None, None, None, False
        try:
            yield
        finally:
            vars(self).update(before)

    def replayed(self, updates: int, norm: Tensor | None) -> None:
        """Count updates of a CUDA graph."""
        self.counts.steps += updates
        if norm is not None:
            self.norm = norm

    def take_over(self, other: "Update") -> None:
        """Go on with the loss scale of another plan, where both have one."""
        if self.scaler.is_enabled() and other.scaler.is_enabled():
            self.scaler = other.scaler

    def load_scale(self, state: dict[str, Any] | None) -> None:
        """Go on with the loss scale of a checkpoint; None: with a new one."""
        self.renew_scale()
        if self.scaler.is_enabled() and state is not None:
            self.scaler.load_state_dict(state)


def _check_closure(trained: TrainedObjective, plan: Plan, across: OneProcess) -> None:
    """Raise for settings that do not work with an optimizer that computes the loss itself."""
    name = type(trained.optimizers[0]).__name__
    obstacles = {
        f"accumulate={plan.accumulate}": plan.accumulate > 1,
        "precision='fp16'": plan.precision == "fp16",
        f"micro_batch={plan.micro_batch}": plan.micro_batch is not None,
        "several ranks": across.size > 1,
    }
    if found := [each for each, is_there in obstacles.items() if is_there]:
        raise BadArgument(
            f"{name} computes the loss several times in a step, which does not go with {' and '.join(found)}",
            fix="leave that out, or use an optimizer whose step() takes no closure, such as torch.optim.AdamW",
        )


def called_inside(
    context: Callable[[], AbstractContextManager[Any]], objective: Objective, model: nn.Module, batch: Any
) -> Any:
    """Call an objective inside a context."""
    with context():
        return objective(model, batch)


def total(parts: Parts) -> Tensor:
    """The sum of the losses of a batch."""
    return next(iter(parts.values())) if len(parts) == 1 else Losses(parts, 1).total


@contextmanager
def _alone(model: nn.Module, items: int, asked: int | None) -> Iterator[None]:
    """Explain the error of batch normalisation on a micro-batch of one item."""
    try:
        yield
    except ValueError as error:
        norms = [m for m in model.modules() if isinstance(m, BatchNorm) and m.training]
        if items > 1 or not norms or "more than 1 value per channel" not in str(error):
            raise
        if asked is not None:
            raise BadArgument(
                f"micro_batch={asked} leaves one item by itself, and batch normalisation cannot learn from one alone",
                fix="choose another size, put those layers in eval mode, or use GroupNorm",
            ) from error
        raise DoesNotFit(
            "two items do not fit into the memory at once, and batch normalisation cannot learn from one alone",
            fix="put those layers in eval mode or use GroupNorm; or make the items smaller",
        ) from error


def norm_of(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """The norm of a gradient, on the device."""
    return surely(partial(nn.utils.get_total_norm, [p.grad for p in parameters if p.grad is not None]), device)
