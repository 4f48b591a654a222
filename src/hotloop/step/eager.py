"""The training step, once: forward, backward, accumulation, clipping and update for one objective.

Everything else in this package calls `EagerStep` and changes nothing in it: `OomRetry` calls it again in micro-batches,
`CapturedStep` captures its calls as a CUDA graph, a compiled objective takes the place of its objective.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from hotloop.step.window import Window
from hotloop.values.snapshot import Gradients

if TYPE_CHECKING:
    from hotloop.step.across import AcrossRanks

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


class EagerStep:
    """Trains one objective on a batch, and returns its losses, detached.

    `see` gets the losses before they reach the weights, `after_update` is called after an update. `memory` is that of
    the OOM retry around it; None: the caller handles running out of memory. Without `updates`, a call accumulates the
    gradient of its batch. `objective` is called in place of the trained one; `across` is that on several ranks.
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
        across: "AcrossRanks | None" = None,
        updates: bool = True,
        objective: Objective | None = None,
    ) -> None:
        self.model, self.trained, self.weighing, self.counts = model, trained, weighing, counts
        self.objective = (
            across or objective or trained.objective
        )  # the callable in use, which may be compiled or watched
        self.across = across
        self.see, self.after_update = see, after_update
        self._begin = 0 if updates else 1  # batches in a new window: gradients of others that are there count as one
        self.window = Window(self._begin)
        self.is_capturing = False
        self.norm: Tensor | None = None  # of the gradient of the last update before it was clipped, on the device
        self.asks_for_norm = False  # of the next update, where nothing else needs it
        self._plan, self._accumulate = plan, plan.accumulate
        self._device = torch.device(plan.device)
        self._is_alone, self._memory = is_alone, memory
        self._counts_items = not isinstance(plan.split, str)
        self._autocast = autocast(self._device, plan.precision)
        self._scales = plan.precision == "fp16"
        self.scaler = _scaler(self._device, enabled=self._scales)
        self._closes = any(map(needs_closure, trained.optimizers))
        if self._closes:
            _check_closure(trained, plan, across)
        self._updates = 0
        self._ordered: tuple[tuple[int, ...], list[nn.Parameter]] = ((), [])  # as in `model.parameters()`, by their ids
        self._earlier: Gradients | None = None  # of the window, out of reach of a pass that may fail
        self._captured_weight: Tensor | None = None  # of a captured window, so far
        self._captured_window: Window | None = None  # after one captured batch

    def __call__(self, batch: Any, size: int | None = None) -> Parts:  # noqa: PLR0912, PLR0915  # one block, read at once
        """Forward, backward and, when the window is full, update; `size`: at most so many items at once."""
        window, name = self.window, self.trained.name
        if window.batches == 0:
            self.trained.zero_grad()
        elif (
            self._memory is not None
            and not self.is_capturing
            and (self.across is None or self.across.sets_aside(is_last=self.phase[1]))
        ):
            self._earlier = Gradients(self.trained.parameters)
            for parameter in self.trained.parameters:
                parameter.grad = None  # not by a `zero_grad` of the person's, which may write zeros into what is noted
        inputs = self._inputs
        if size is None and self._accumulate == 1 and self.across is None:
            with self._autocast:
                losses = uniform(self.objective(self.model, batch), batch, name)
            if self._counts_items and not losses.is_counted:
                losses.count = self.weighing.items_in(batch)
            loss = losses.total
            (self.scaler.scale(loss) if self._scales else loss).backward(inputs=inputs)
            del loss
            losses.detach_parts()
        else:  # each batch or micro-batch weighs as much as its loss is the mean over
            window, joint, across = window.copy(), None, self.across
            items = done = self.weighing.items_in(batch)
            verdict = self._verdict(batch, items, size)
            plain = across or self.trained.objective
            whole = ((batch, items, None),)
            for part, count, weight in (
                whole if size is None else micro_batches_of(batch, items, size, self._plan.split)
            ):
                done -= count
                is_last = done == 0 and self.phase[1]  # before the update
                shared = _NOTHING if across is None else across.synchronizing(is_last=is_last)
                with self._autocast, shared, _alone(self.model, count, self._asked) if count < items else _NOTHING:
                    losses = self.weighing.losses(
                        verdict, name, self.objective, plain, self.model, part, count, weight, is_part=count < items
                    )
                if across is None:
                    weighed = window.weighed(losses, self._sum_of_weights(losses))
                else:
                    weighed = across.weighed(window, losses, is_last=is_last)
                if weighed is not None:
                    self.scaler.scale(weighed).backward(inputs=inputs)
                del weighed
                losses.detach_parts()
                joint = losses if joint is None else joint.joined_with(losses)
            assert joint is not None
            losses = joint
            if across is not None:
                across.after_backward(losses)
        if self._memory is not None and self._memory.snapshot.is_looking:  # at the passes, not at the update
            self._memory.snapshot.learn()
        if self.see is not None:  # a loss that is not finite is an error here: nothing of its batch stays
            self.see(losses.parts, losses.count)
        if self._earlier is not None:
            if self._begin:
                window.average(self.trained.parameters, self._device)
            if losses.first != 0:  # else nothing counted in the batch before
                self._earlier.add()
            self._earlier = None
        if self._begin:
            return losses.parts
        window.batches += 1
        self.window = window
        if self.is_capturing and window.batches == 1:
            self._captured_window = window.copy()
        if window.batches >= self._accumulate:
            self.update(self._closure(batch, losses, size) if self._closes else None)
        return losses.parts

    def update(self, closure: Callable[[], Tensor] | None = None) -> bool:  # noqa: PLR0912  # as above
        """Average, unscale, clip and step; returns whether the scaler let the optimizers step.

        `closure`: for an optimizer that computes the loss again, such as LBFGS.
        """
        window, self.window = self.window, Window()
        optimizers, scaler = self.trained.optimizers, self.scaler
        most, most_value = self._plan.clip_norm, self._plan.clip_value
        clips = most is not None or most_value is not None
        memory = None if self.is_capturing else self._memory
        before = scaler.get_scale() if self._scales else 0.0
        try:  # what fails for want of memory has done nothing, so that it can be repeated
            if self.across is not None:
                self.across.finish(window)
            if window.is_weighed:
                window.average(self.trained.parameters, self._device)
            for optimizer in optimizers if self._scales and clips else ():
                surely(partial(scaler.unscale_, optimizer), self._device)
            if most is not None:
                self.norm = _clip(self._in_order(), most, self._device)
            elif self.asks_for_norm and not self.is_capturing:
                self.asks_for_norm = False
                if not any(p.grad is not None and p.grad.is_sparse for p in self.trained.parameters):
                    self.norm = norm_of(self.trained.parameters, self._device) / ((not clips and before) or 1.0)
            if most_value is not None:
                _clip_values(self.trained.parameters, most_value, self._device)
            with fused_steps(optimizers, has_scaler=self._scales, is_scaled=self._scales and not clips):
                if closure is not None:
                    optimizers[0].step(closure)  # type: ignore[arg-type]  # LBFGS calls float on it
                elif memory is not None and (
                    memory.portion.is_tight
                    or (self._updates < FIRST_UPDATES and not is_plenty(optimizers, self._device))
                ):
                    with guarded(optimizers):
                        for optimizer in optimizers:
                            surely(partial(scaler.step, optimizer), self._device)
                else:
                    for optimizer in optimizers:
                        scaler.step(optimizer) if self._scales else unprofiled_step(optimizer)()
            if self._scales:
                surely(scaler.update, self._device)
        except Exception as error:
            if memory is None or not is_out_of_memory(error):
                raise
            raise half_updated(error) from error
        # The public sign of a skipped step: the scale backs off. (It reads one number; the step has just read another.)
        stepped = not self._scales or scaler.get_scale() >= before
        self._updates += 1
        if self._updates == 1 and self._is_alone and not self.is_capturing:
            tell_of_weights_without_optimizer(self.model, self.trained)
        self.counts.steps += stepped
        self.counts.skipped += not stepped
        if stepped and self.after_update is not None:
            self.after_update(self.trained)
        return stepped

    def _closure(self, batch: Any, losses: Losses, size: int | None) -> Callable[[], Tensor]:
        """A closure that computes loss and gradient of a batch again once weights have changed."""
        if size is not None:
            raise DoesNotFit(
                "a batch does not fit into the memory, and an optimizer that computes the loss itself needs all of it",
                fix="use smaller batches, bf16 or activation checkpointing",
            )
        parameters, inputs = self.trained.parameters, self._inputs
        first, known = losses.total, [version_of(p) for p in parameters]

        def closure() -> Tensor:
            if known == [version_of(p) for p in parameters]:
                return first
            with torch.enable_grad():
                self.trained.zero_grad()
                with self._autocast:
                    loss = uniform(self.objective(self.model, batch), batch, self.trained.name).total
                loss.backward(inputs=inputs)
            if self._plan.clip_norm is not None:
                _clip(self._in_order(), self._plan.clip_norm, self._device)
            if self._plan.clip_value is not None:
                _clip_values(parameters, self._plan.clip_value, self._device)
            return loss.detach()

        return closure

    def _in_order(self) -> list[nn.Parameter]:
        """The weights in the order of `model.parameters()`: in another, a norm rounds otherwise."""
        parameters = self.trained.parameters
        if sum(len(optimizer.param_groups) for optimizer in self.trained.optimizers) < 2:
            return parameters
        ids = tuple(map(id, parameters))
        if ids != self._ordered[0]:
            trained = set(ids)
            every = dict.fromkeys((*self.model.parameters(), *parameters))
            self._ordered = (ids, [each for each in every if id(each) in trained])
        return self._ordered[1]

    @property
    def _inputs(self) -> list[nn.Parameter] | None:
        """The `inputs` of the backward pass: weights of this objective only."""
        return None if self._is_alone else [p for p in self.trained.parameters if p.requires_grad]

    @property
    def phase(self) -> tuple[bool, bool]:
        """Whether the next batch is the first of its window, and whether it is the last."""
        batches = self.window.batches
        return batches == 0, batches + 1 >= self._accumulate

    def begin(self) -> None:
        """Begin a new window, and with loss scaling a new scale."""
        self.window = Window(self._begin)
        self.scaler = _scaler(self._device, enabled=self._scales)

    def undo(self) -> None:
        """Restore the window and its gradients after a call that failed before its update."""
        if self.across is not None:
            self.across.undo(holds_others=self.window.batches > 0 and self.phase[1])
        if self._earlier is not None:
            self._earlier.restore()
            self._earlier = None
        elif self.window.batches == 0:
            self.trained.zero_grad()

    def forward(self, batch: Any, size: int | None = None) -> None:
        """The forward passes of a call alone, without gradients."""
        items, name, split = self.weighing.items_in(batch), self.trained.name, self._plan.split
        verdict = self.weighing.known(name, batch)
        with self._autocast:
            for part, count, weight in micro_batches_of(batch, items, size or items, split):
                if size is None and self._accumulate == 1:
                    self.objective(self.model, part)
                else:
                    self.weighing.losses(
                        verdict, name, self.objective, self.trained.objective, self.model, part, count, weight
                    )

    # While several batches or a whole window are captured

    @contextmanager
    def capturing(self, see: See) -> Iterator[None]:
        """Inside a capture: the host counts nothing, and the losses go to `see`."""
        before = self.see, self.after_update, self.window, replace(self.counts), self._updates, self.norm
        self.see, self.after_update, self.norm = see, None, None
        self.window, self.is_capturing = self.window.copy(), True
        try:
            yield
        finally:
            self.see, self.after_update, self.window, counts, self._updates, self.norm = before
            self.counts.set(counts.steps, counts.skipped)
            self.is_capturing = False

    def replayed(self, batches: int = 1) -> None:
        """Count batches that a CUDA graph has trained on."""
        if self._accumulate == 1:
            self.counts.steps += batches
            return
        one = self._captured_window or self.window
        for _ in range(batches):
            window = self.window
            window.unit, window.is_weighed = one.unit, one.is_weighed
            window.weight = one.weight if isinstance(one.weight, Tensor) else window.weight + one.weight
            window.batches += 1
            if window.batches >= self._accumulate:
                self.window = Window()
                self.counts.steps += 1

    def _sum_of_weights(self, losses: Losses) -> Tensor | None:
        """The device tensor that sums the weights of a captured window.

        The graphs of a window's first, middle and last batch share it, so it is made before any of them.
        """
        if not self._plan.graph or not isinstance(losses.mass, Tensor):
            return None
        if self._captured_weight is None:
            self._captured_weight = torch.zeros((), dtype=torch.float32, device=losses.mass.device)
        return self._captured_weight if self.is_capturing else None

    def _verdict(self, batch: Any, items: int, size: int | None) -> Verdict:
        """How micro-batches, or batches of a window, are weighed; raises or warns where they differ from the whole."""
        name, weighing, split = self.trained.name, self.weighing, self._plan.split
        if self._memory is None or self.is_capturing:  # a trial, or a capture: what was found before holds
            return weighing.known(name, batch)
        if size is None or size >= items:
            verdict = weighing.verdict(name, self._probe, batch, items, None)
            if self._accumulate > 1:
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
        given = None if self._plan.precision == "fp32" else self._autocast
        return Probe(self.trained.objective, self.model, modules, self._device, given, self.trained.parameters)


def _check_closure(trained: TrainedObjective, plan: Plan, across: object) -> None:
    """Raise for settings that do not work with an optimizer that computes the loss itself."""
    name = type(trained.optimizers[0]).__name__
    obstacles = {
        f"accumulate={plan.accumulate}": plan.accumulate > 1,
        "precision='fp16'": plan.precision == "fp16",
        f"micro_batch={plan.micro_batch}": plan.micro_batch is not None,
        "several ranks": across is not None,
    }
    if found := [each for each, is_there in obstacles.items() if is_there]:
        raise BadArgument(
            f"{name} computes the loss several times in a step, which does not go with {' and '.join(found)}",
            fix="leave that out, or use an optimizer whose step() takes no closure, such as torch.optim.AdamW",
        )


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


def _scaler(device: torch.device, *, enabled: bool) -> torch.amp.GradScaler:
    """A `GradScaler` with its tensors allocated: running out of memory in its lazy start would leave it unusable."""
    scaler = torch.amp.GradScaler(device.type, enabled=enabled)
    if enabled:
        scaler.scale(torch.zeros((), device=device))
    return scaler


def norm_of(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """The norm of a gradient, on the device."""
    return surely(partial(nn.utils.get_total_norm, [p.grad for p in parameters if p.grad is not None]), device)


def _clip(parameters: Sequence[nn.Parameter], most: float, device: torch.device) -> Tensor:
    """`clip_grad_norm_` in parts, each all or nothing for OOM retry; returns the norm before clipping."""
    norm = norm_of(parameters, device)
    for dtype in {p.grad.dtype for p in parameters if p.grad is not None}:
        alike = [p for p in parameters if p.grad is not None and p.grad.dtype == dtype]
        surely(partial(nn.utils.clip_grads_with_norm_, alike, most, norm), device)
    return norm


def _clip_values(parameters: Sequence[nn.Parameter], most: float, device: torch.device) -> None:
    """`clip_grad_value_`, which can be repeated safely."""
    surely(partial(nn.utils.clip_grad_value_, parameters, most), device)
