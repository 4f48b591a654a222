"""From losses to new weights: backward, accumulation, loss scaling, clipping, the optimizers and their schedules."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hotloop.errors import BadArgument
from hotloop.objective import Losses, Objective
from hotloop.plan import Plan

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
Schedulers = LRScheduler | Sequence[LRScheduler] | None
Every = Literal["step", "epoch"]


@dataclass(frozen=True)
class Turn:
    """One objective and the optimizers that follow it; most loops have one turn, a GAN has two."""

    name: str
    objective: Objective
    optimizers: tuple[Optimizer, ...]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for o in self.optimizers for group in o.param_groups for p in group["params"]]


def turns_of(optimizer: Optimizers, objective: Objective | Mapping[str, Objective]) -> tuple[Turn, ...]:
    """Pair objectives with optimizers: by name where there are several objectives, else all follow the one."""
    if isinstance(objective, Mapping):
        if not isinstance(optimizer, Mapping) or set(optimizer) != set(objective):
            named = sorted(optimizer) if isinstance(optimizer, Mapping) else type(optimizer).__name__
            raise BadArgument(
                f"objectives {sorted(objective)} do not pair with optimizers {named}",
                fix="give both as dicts with the same names; the turns are taken in the order of the objectives",
            )
        return tuple(Turn(name, objective[name], (optimizer[name],)) for name in objective)
    every = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    optimizers = (every,) if isinstance(every, Optimizer) else tuple(every)
    wrong = next((o for o in optimizers if not isinstance(o, Optimizer)), None)
    if wrong is not None or not optimizers:
        raise BadArgument(
            f"the optimizer is a {type(wrong).__name__}" if optimizers else "no optimizer was given",
            fix="give one of torch.optim, built from model.parameters(); or a list or dict of them",
        )
    return (Turn("loss", objective, optimizers),)


@dataclass(slots=True)
class _Window:
    """The batches of one turn since its last update."""

    batches: int = 0
    first: int | Tensor = 1  # items in its first batch: the unit in which the others count
    weight: float | Tensor = 0.0  # the sum of the others' weights in that unit


@dataclass
class Update:
    """Turns losses into updates of the weights.

    Accumulation equals the full batch: each batch weighs as many items as it holds, and the gradient is divided by
    what was really seen, so an uneven last batch or a short last window is not counted too much or too little.
    """

    turns: tuple[Turn, ...]
    plan: Plan
    averages: bool = True  # losses are means over items, not sums
    steps: int = 0
    skipped: int = 0
    keep_gradients: bool = False  # zero them where they are: a CUDA graph has their addresses
    _windows: dict[str, _Window] = field(default_factory=dict)
    _scalers: dict[str, torch.amp.GradScaler] = field(default_factory=dict)  # for fp16 only

    def __post_init__(self) -> None:
        self._windows = {turn.name: _Window() for turn in self.turns}
        if self.plan.precision == "fp16":
            kind = torch.device(self.plan.device).type
            self._scalers = {turn.name: torch.amp.GradScaler(kind) for turn in self.turns}

    def begin(self, turn: Turn) -> None:
        """Before a forward pass: at the start of a window the gradients of the last one go."""
        if self._windows[turn.name].batches == 0:
            for optimizer in turn.optimizers:
                optimizer.zero_grad(set_to_none=not self.keep_gradients)

    def take(self, turn: Turn, losses: Losses) -> bool | None:
        """Add the gradient of one batch; at the end of a window, update. Whether it did; None while it waits."""
        window = self._windows[turn.name]
        loss = self._weighed(window, losses)
        if self._scalers:
            loss = self._scalers[turn.name].scale(loss)
        # With several turns, a loss must not leave gradients on the weights of another turn.
        loss.backward(inputs=turn.parameters if len(self.turns) > 1 else None)
        del loss
        losses.let_go()
        window.batches += 1
        return self._apply(turn) if window.batches >= self.plan.accumulate else None

    @property
    def phase(self) -> tuple[bool, bool]:
        """Whether the next batch is the first of its window, and whether it is the last."""
        batches = self._windows[self.turns[0].name].batches
        return batches == 0, batches + 1 >= self.plan.accumulate

    def is_even(self, items: int | Tensor) -> bool:
        """Whether the window so far holds only batches of so many items."""
        window = self._windows[self.turns[0].name]
        if isinstance(window.first, Tensor) or isinstance(window.weight, Tensor):
            return False
        return window.batches == 0 or (window.first == items and window.weight == window.batches)

    def count(self, items: int | Tensor, batches: int = 1) -> None:
        """Note batches that a CUDA graph has taken, each of so many items."""
        for turn in self.turns:
            window = self._windows[turn.name]
            for _ in range(batches if self.plan.accumulate > 1 else 0):
                window.first = items if window.batches == 0 else window.first
                window.weight = window.weight + items / window.first
                window.batches += 1
                if window.batches >= self.plan.accumulate:
                    self._windows[turn.name] = window = _Window()
                    self.steps += 1
            self.steps += batches if self.plan.accumulate == 1 else 0

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """For calls that are recorded and not run: afterwards nothing has been counted."""
        before = self.steps, self.skipped, {name: replace(window) for name, window in self._windows.items()}
        try:
            yield
        finally:
            self.steps, self.skipped, self._windows = before

    def take_over(self, other: "Update") -> None:
        """Go on where another has stopped, between two windows: its counts, and where both scale losses its scales."""
        self.steps, self.skipped = other.steps, other.skipped
        self._scalers = {name: other._scalers.get(name, scaler) for name, scaler in self._scalers.items()}

    def flush(self) -> list[Turn]:
        """Update with windows that the end of the epoch cut short; the turns that were updated."""
        return [turn for turn in self.turns if self._windows[turn.name].batches and self._apply(turn)]

    def _weighed(self, window: _Window, losses: Losses) -> Tensor:
        if self.plan.accumulate == 1 or not self.averages:
            return losses.total
        if window.batches == 0:
            window.first = losses.count.clamp_min(1) if isinstance(losses.count, Tensor) else max(losses.count, 1)
        weight = losses.count / window.first
        window.weight = window.weight + weight
        return losses.total * weight

    def _apply(self, turn: Turn) -> bool:
        window = self._windows[turn.name]
        if self.plan.accumulate > 1 and self.averages:
            _divide([p.grad for p in turn.parameters if p.grad is not None], window.weight)
        window.batches, window.weight = 0, 0.0
        scaler = self._scalers.get(turn.name)
        if self.plan.clip_norm is not None:
            if scaler is not None:
                for optimizer in turn.optimizers:
                    scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(turn.parameters, self.plan.clip_norm)
        stepped = _step(turn.optimizers) if scaler is None else _scaled_step(turn.optimizers, scaler)
        self.steps += stepped
        self.skipped += not stepped
        return stepped


def _step(optimizers: tuple[Optimizer, ...]) -> bool:
    for optimizer in optimizers:
        optimizer.step()
    return True


def _scaled_step(optimizers: tuple[Optimizer, ...], scaler: torch.amp.GradScaler) -> bool:
    """A step that the scaler leaves out when the gradient overflowed; whether it was made."""
    before = scaler.get_scale()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    # The public sign of a skipped step: the scale backs off. (It reads one number; torch has just read another.)
    return scaler.get_scale() >= before


def _divide(gradients: list[Tensor], by: float | Tensor) -> None:
    if gradients:
        torch._foreach_div_(gradients, by)


@dataclass(frozen=True)
class Schedule:
    """Advances learning-rate schedulers: never for a step that was skipped."""

    schedulers: tuple[LRScheduler, ...]
    every: Every

    @classmethod
    def of(cls, scheduler: Schedulers, every: Every) -> "Schedule":
        if every not in ("step", "epoch"):
            raise BadArgument(f"schedule={every!r}", fix='choose "step" (after each update) or "epoch"')
        schedulers = (
            () if scheduler is None else (scheduler,) if isinstance(scheduler, LRScheduler) else tuple(scheduler)
        )
        return cls(schedulers, every)

    @property
    def watches_a_metric(self) -> bool:
        return any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self.schedulers)

    def after_update(self, turn: Turn) -> None:
        if not self.schedulers:
            return
        for scheduler in self._counting("step"):
            if scheduler.optimizer in turn.optimizers:
                scheduler.step()

    def after_epoch(self) -> None:
        for scheduler in self._counting("epoch"):
            scheduler.step()

    def after_evaluation(self, value: float) -> None:
        """For schedulers that watch a metric: the validation loss, or the training loss without one."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(value)

    def _counting(self, every: Every) -> list[LRScheduler]:
        """The schedulers that count these; one that watches a metric counts nothing."""
        return [s for s in self.schedulers if every == self.every and not isinstance(s, ReduceLROnPlateau)]
