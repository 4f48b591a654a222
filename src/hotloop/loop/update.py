"""From losses to new weights: backward, accumulation, loss scaling, clipping and the optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.loop.turns import Turn
from hotloop.loop.window import Aside, Window
from hotloop.memory.guard import guarded_step
from hotloop.memory.oom import half_updated, is_out_of_memory, is_recording, surely
from hotloop.objective import Losses
from hotloop.plan import Plan
from hotloop.weighing import LATER, Weighing

FIRST = 2  # updates in which an optimizer allocates what it will go on using


@dataclass
class Update:
    """Turns losses into updates of the weights.

    Accumulation equals the full batch: each batch weighs as much as its loss is the mean over, and the gradient is
    divided by what was really seen, so an uneven last batch or a short last window is not counted too much or too
    little. Where the loss couples the samples of a batch, it is the mean of the batches' losses, and that is said.
    """

    turns: tuple[Turn, ...]
    plan: Plan
    averages: bool = True  # losses are means over items, not sums
    steps: int = 0
    skipped: int = 0
    keep_gradients: bool = False  # zero them where they are: a CUDA graph has their addresses
    survives: bool = False  # whether running out of memory is looked after, and not the caller's affair
    is_tight: Callable[[], bool] = lambda: False  # whether memory may run out in the middle of an optimizer's step
    weighing: Weighing = field(init=False)  # what a batch weighs beside the others of its window
    _windows: dict[str, Window] = field(default_factory=dict)
    _totals: dict[str, Tensor] = field(default_factory=dict)  # of captured windows: their weights so far
    _captured: dict[str, Window] = field(default_factory=dict)  # windows after one batch of a CUDA graph
    _scalers: dict[str, torch.amp.GradScaler] = field(default_factory=dict)  # for fp16 only

    def __post_init__(self) -> None:
        # A comparison waits for the device, which ends a capture: there, only first cuts are compared.
        self.weighing = Weighing(self.plan.split, sums=not self.averages, later=() if self.plan.graph else LATER)
        self._reset()

    def _reset(self) -> None:
        self._windows = {turn.name: Window() for turn in self.turns}
        if self.plan.precision == "fp16":
            self._scalers = {turn.name: _scaler(torch.device(self.plan.device)) for turn in self.turns}

    def begin(self, turn: Turn) -> None:
        """Before a forward pass: at the start of a window the gradients of the last one go."""
        if self._windows[turn.name].batches == 0:
            if not self.keep_gradients:
                turn.clear()
                return
            for optimizer in turn.optimizers:
                optimizer.zero_grad(set_to_none=False)

    def take(self, turn: Turn, losses: Losses) -> bool | None:
        """Add the gradient of one batch; at the end of a window, update. Whether it did; None while it waits."""
        self.add(turn, losses)
        return self.end_batch(turn)

    def add(self, turn: Turn, losses: Losses, *, is_part: bool = False) -> None:
        """Add the gradient of a batch, or of a micro-batch."""
        if self.plan.accumulate == 1 and not is_part:
            loss: Tensor | None = losses.total
        else:
            loss = self._windows[turn.name].weighed(losses, self._captured_total(turn, losses))
        if loss is not None:
            if self._scalers:
                loss = self._scalers[turn.name].scale(loss)
            # With several turns, a loss must not leave gradients on the weights of another turn.
            loss.backward(inputs=turn.parameters if len(self.turns) > 1 else None)
            del loss
        losses.let_go()

    def _captured_total(self, turn: Turn, losses: Losses) -> Tensor | None:
        """While a CUDA graph is captured, where the weights of a window are added up on the device.

        The graphs of a window's first, middle and last batch share it, so it is made before any of them.
        """
        if not self.plan.graph or not isinstance(losses.mass, Tensor):
            return None
        if turn.name not in self._totals:
            self._totals[turn.name] = torch.zeros((), device=losses.mass.device)
        return self._totals[turn.name] if is_recording() else None

    def end_batch(self, turn: Turn) -> bool | None:
        """After the last gradient of a batch: at the end of a window, update. Whether it did; None while it waits."""
        window = self._windows[turn.name]
        if self.plan.graph and window.batches == 0 and is_recording():
            self._captured[turn.name] = replace(window)
        window.batches += 1
        return self._apply(turn) if window.batches >= self.plan.accumulate else None

    def set_aside(self, turn: Turn) -> "Taken":
        """What the window holds, before a batch that may fail is added to it."""
        window = self._windows[turn.name]
        first = window.batches == 0
        return Taken(self, turn, replace(window), Aside(turn, empty=first, kept=first and self.keep_gradients))

    @property
    def phase(self) -> tuple[bool, bool]:
        """Whether the next batch is the first of its window, and whether it is the last."""
        batches = self._windows[self.turns[0].name].batches
        return batches == 0, batches + 1 >= self.plan.accumulate

    def is_even(self) -> bool:
        """Whether the window so far holds only batches like those of the CUDA graphs."""
        return all(self._is_even(turn) for turn in self.turns)

    def _is_even(self, turn: Turn) -> bool:
        window, one = self._windows[turn.name], self._captured.get(turn.name)
        if window.batches == 0:
            return True
        if one is None or window.is_weighed != one.is_weighed or window.unit != one.unit:
            return False
        if isinstance(one.weight, Tensor):
            return window.weight is one.weight  # else a batch has joined it outside the graphs
        return not isinstance(window.weight, Tensor) and isclose(window.weight, window.batches * one.weight)

    def count(self, batches: int = 1) -> None:
        """Note batches that a CUDA graph has taken."""
        for turn in self.turns:
            window = self._windows[turn.name]
            one = self._captured.get(turn.name, window)
            for _ in range(batches if self.plan.accumulate > 1 else 0):
                window.unit, window.is_weighed = one.unit, one.is_weighed
                window.weight = one.weight if isinstance(one.weight, Tensor) else window.weight + one.weight
                window.batches += 1
                if window.batches >= self.plan.accumulate:
                    self._windows[turn.name] = window = Window()
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
        if self.plan.split == other.plan.split:
            self.weighing.take_over(other.weighing)
        self._scalers = {name: other._scalers.get(name, scaler) for name, scaler in self._scalers.items()}

    def to_state(self) -> dict[str, Any]:
        """Its counts and scales, between two windows."""
        scalers = {name: scaler.state_dict() for name, scaler in self._scalers.items()}
        return {"steps": self.steps, "skipped": self.skipped, "scalers": scalers}

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue from what `to_state` gave; half a window that a step has left behind is dropped."""
        self._reset()
        self.steps, self.skipped = state["steps"], state["skipped"]
        for name, scaler in self._scalers.items():
            if name in state["scalers"]:
                scaler.load_state_dict(state["scalers"][name])

    def flush(self) -> list[Turn]:
        """Update with windows that the end of the epoch cut short; the turns that were updated."""
        return [turn for turn in self.turns if self._windows[turn.name].batches and self._apply(turn)]

    def _apply(self, turn: Turn) -> bool:
        """Update with what the window holds. Each part is done at once or not at all, so that it can be repeated."""
        window = self._windows[turn.name]
        self._windows[turn.name] = Window()
        try:
            stepped = self._updated(turn, window)
        except Exception as error:
            if not self.survives or is_recording() or not is_out_of_memory(error):
                raise
            raise half_updated(error) from error
        self.steps += stepped
        self.skipped += not stepped
        return stepped

    def _updated(self, turn: Turn, window: Window) -> bool:
        device = torch.device(self.plan.device)
        scaler = self._scalers.get(turn.name)
        if window.is_weighed:
            window.divide(turn.parameters, device)
        if self.plan.clip_norm is not None:
            if scaler is not None:
                for optimizer in turn.optimizers:
                    surely(partial(scaler.unscale_, optimizer), device)
            _clip(turn.parameters, self.plan.clip_norm, device)
        guarded = self._is_guarded()
        with _guarded(turn.optimizers) if guarded else nullcontext():
            if scaler is None:
                return _step(turn.optimizers)
            return _scaled_step(turn.optimizers, scaler, device, again=guarded)

    def _is_guarded(self) -> bool:
        """Whether memory may run out in the middle of an optimizer's step, so that it must be one to take back."""
        return self.survives and (self.steps < FIRST or self.is_tight()) and not is_recording()


@contextmanager
def _guarded(optimizers: tuple[Optimizer, ...]) -> Iterator[None]:
    """A step of these optimizers is done at once or not at all."""
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
class Taken:
    """A batch that is being added to a window, which is kept as it was before."""

    update: Update
    turn: Turn
    window: Window
    aside: Aside

    def undo(self) -> None:
        """The batch failed and will be repeated."""
        self.update._windows[self.turn.name] = replace(self.window)
        self.aside.undo()

    def put(self) -> None:
        """The batch failed for good: the window is as if it had not come."""
        self.undo()
        self.aside.put()


def _step(optimizers: tuple[Optimizer, ...]) -> bool:
    for optimizer in optimizers:
        optimizer.step()
    return True


def _scaled_step(
    optimizers: tuple[Optimizer, ...], scaler: torch.amp.GradScaler, device: torch.device, *, again: bool
) -> bool:
    """A step that the scaler leaves out when the gradient overflowed; whether it was made.

    `again`: a step of an optimizer is done at once or ends the run, so that what is around it may be repeated.
    """
    before = scaler.get_scale()
    for optimizer in optimizers:
        if again:
            surely(partial(scaler.step, optimizer), device)
        else:
            scaler.step(optimizer)
    surely(scaler.update, device)
    # The public sign of a skipped step: the scale backs off. (It reads one number; torch has just read another.)
    return scaler.get_scale() >= before


def _scaler(device: torch.device) -> torch.amp.GradScaler:
    """A scaler that has its tensors already: it could not be used again if memory ran out while it makes them."""
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def _clip(parameters: list[nn.Parameter], most: float, device: torch.device) -> None:
    """`clip_grad_norm_` in parts, each of which is done at once or not at all."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = surely(partial(nn.utils.get_total_norm, gradients), device)
    for dtype in {gradient.dtype for gradient in gradients}:
        alike = [p for p in parameters if p.grad is not None and p.grad.dtype == dtype]
        surely(partial(nn.utils.clip_grads_with_norm_, alike, most, norm), device)
