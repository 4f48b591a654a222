"""From losses to new weights: backward, accumulation, loss scaling, clipping, the optimizers and their schedules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hotloop.errors import BadArgument
from hotloop.memory.guard import guarded_step
from hotloop.memory.survive import surely
from hotloop.objective import Losses, Objective
from hotloop.plan import Plan

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
Schedulers = LRScheduler | Sequence[LRScheduler] | None
Every = Literal["step", "epoch"]
Gradients = list[tuple[nn.Parameter, Tensor]]

FIRST = 2  # updates in which an optimizer allocates what it will go on using


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
    is_weighed: bool = False  # whether it holds the gradients of several batches or pieces, by their weights


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
    is_tight: Callable[[], bool] = lambda: False  # whether memory may run out in the middle of an optimizer's step
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
        self.add(turn, losses)
        return self.end_batch(turn)

    def add(self, turn: Turn, losses: Losses, unit: int | None = None) -> None:
        """Add the gradient of a batch, or of a piece of a batch that holds `unit` items."""
        window = self._windows[turn.name]
        loss = self._weighed(window, losses, unit)
        if self._scalers:
            loss = self._scalers[turn.name].scale(loss)
        # With several turns, a loss must not leave gradients on the weights of another turn.
        loss.backward(inputs=turn.parameters if len(self.turns) > 1 else None)
        del loss
        losses.let_go()

    def end_batch(self, turn: Turn) -> bool | None:
        """After the last gradient of a batch: at the end of a window, update. Whether it did; None while it waits."""
        window = self._windows[turn.name]
        window.batches += 1
        return self._apply(turn) if window.batches >= self.plan.accumulate else None

    def set_aside(self, turn: Turn) -> "Aside":
        """What the window holds, before a batch that may fail is added to it."""
        window = self._windows[turn.name]
        before: Gradients = []
        if window.batches:
            before = [(p, p.grad) for p in turn.parameters if p.grad is not None]
            for parameter, _ in before:
                parameter.grad = None
        return Aside(self, turn, replace(window), before)

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
                window.is_weighed = self.averages
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

    def to_state(self) -> dict[str, Any]:
        """Its counts and scales, between two windows."""
        scalers = {name: scaler.state_dict() for name, scaler in self._scalers.items()}
        return {"steps": self.steps, "skipped": self.skipped, "scalers": scalers}

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue from what `to_state` gave."""
        self.steps, self.skipped = state["steps"], state["skipped"]
        for name, scaler in self._scalers.items():
            if name in state["scalers"]:
                scaler.load_state_dict(state["scalers"][name])

    def flush(self) -> list[Turn]:
        """Update with windows that the end of the epoch cut short; the turns that were updated."""
        return [turn for turn in self.turns if self._windows[turn.name].batches and self._apply(turn)]

    def _weighed(self, window: _Window, losses: Losses, unit: int | None) -> Tensor:
        if not self.averages or (self.plan.accumulate == 1 and unit is None):
            return losses.total
        if not window.is_weighed:
            first = losses.count if unit is None or losses.is_counted else unit
            window.first = first.clamp_min(1) if isinstance(first, Tensor) else max(first, 1)
            window.is_weighed = True
        weight = losses.count / window.first
        window.weight = window.weight + weight
        return losses.total * weight

    def _apply(self, turn: Turn) -> bool:
        """Update with what the window holds. Each part is done at once or not at all, so that it can be repeated."""
        window = self._windows[turn.name]
        device = torch.device(self.plan.device)
        if window.is_weighed:
            gradients = [p.grad for p in turn.parameters if p.grad is not None]
            surely(partial(_divide, gradients, window.weight), device)
        self._windows[turn.name] = _Window()
        scaler = self._scalers.get(turn.name)
        if self.plan.clip_norm is not None:
            if scaler is not None:
                for optimizer in turn.optimizers:
                    surely(partial(scaler.unscale_, optimizer), device)
            surely(partial(nn.utils.clip_grad_norm_, turn.parameters, self.plan.clip_norm), device)
        with self._guarded(turn.optimizers):
            stepped = _step(turn.optimizers) if scaler is None else _scaled_step(turn.optimizers, scaler)
        self.steps += stepped
        self.skipped += not stepped
        return stepped

    @contextmanager
    def _guarded(self, optimizers: tuple[Optimizer, ...]) -> Iterator[None]:
        """While memory may run out in a step of these optimizers, it can be taken back."""
        if self.steps >= FIRST and not self.is_tight():
            yield
            return
        before = [(optimizer, vars(optimizer).get("step")) for optimizer in optimizers]
        for optimizer in optimizers:
            vars(optimizer)["step"] = partial(guarded_step, optimizer, optimizer.step)
        try:
            yield
        finally:
            for optimizer, own in before:
                if own is None:
                    del vars(optimizer)["step"]
                else:
                    vars(optimizer)["step"] = own


@dataclass(frozen=True)
class Aside:
    """A window as it was before a batch, and the gradients that it held."""

    update: Update
    turn: Turn
    window: _Window
    before: Gradients

    def put(self) -> None:
        """The batch failed: take its gradients back."""
        self.update._windows[self.turn.name] = replace(self.window)
        for parameter in self.turn.parameters:
            if parameter.grad is not None:
                if self.window.batches == 0 and self.update.keep_gradients:
                    parameter.grad.zero_()  # a CUDA graph has its address
                else:
                    parameter.grad = None

    def join(self) -> None:
        """The batch went well: add its gradients to those of the window."""
        both = [(p, before, p.grad) for p, before in self.before if p.grad is not None]
        if all(not before.is_sparse and not new.is_sparse for _, before, new in both):
            if both:
                torch._foreach_add_([before for _, before, _ in both], [new for _, _, new in both])
        else:
            both = [(p, before + new, new) for p, before, new in both]
        for parameter, total, _ in both:
            parameter.grad = total
        for parameter, before in self.before:
            if parameter.grad is None:  # this batch did not reach it
                parameter.grad = before


def _step(optimizers: tuple[Optimizer, ...]) -> bool:
    for optimizer in optimizers:
        optimizer.step()
    return True


def _scaled_step(optimizers: tuple[Optimizer, ...], scaler: torch.amp.GradScaler) -> bool:
    """A step that the scaler leaves out when the gradient overflowed; whether it was made."""
    before = scaler.get_scale()
    for optimizer in optimizers:
        surely(partial(scaler.step, optimizer), optimizer.param_groups[0]["params"][0].device)
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
