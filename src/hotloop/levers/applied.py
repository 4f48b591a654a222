"""`AppliedPlan`: the levers of a plan, applied to a model and its optimizers, and reverted."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.levers import acting_levers
from hotloop.levers.base import LayerForward, Lever, Undo
from hotloop.levers.channels_last import to_memory_format
from hotloop.levers.flags import PlannedFlags, settle_state
from hotloop.plan import Plan

_NOTHING = nullcontext()


class AppliedPlan:
    """The levers of a plan on a model: `apply` changes it, `revert` undoes it, `around` sets PyTorch's flags."""

    def __init__(self, plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.plan = plan
        self._model = model
        self._optimizers = optimizers
        self._levers = acting_levers(plan)
        # Steps ask only those that have something to say: a step may take less than asking all of them.
        self._switching = [lever for lever in self._levers if lever.around(plan) is not None]
        self._feeding = [lever for lever in self._levers if type(lever).inputs is not Lever.inputs]
        self.acts_on_steps = bool(self._switching or self._feeding)  # and not only on the model and its optimizers
        self.is_displaced = False  # whether another loop has undone it, on whose model it was
        self._flags: list[PlannedFlags] = []
        self._undo: list[Undo] = []

    def apply(self) -> None:
        """Change the model and its optimizers as the plan says."""
        self.is_displaced = False
        self._flags = [PlannedFlags(optimizer, self) for optimizer in self._optimizers]
        for lever in self._levers:
            for undo in lever.apply(self._model, self._optimizers, self.plan):
                self._undo.append(undo)  # one by one: what was done before an error can be undone
        for _, forward in _replaced(self._model):
            forward.plan = forward.plan or self
        for flags in self._flags:
            flags.hold()
        for optimizer in self._optimizers:
            settle_state(optimizer)

    def revert(self) -> None:
        """Undo what `apply` did."""
        while self._undo:
            self._undo.pop()()
        for flags in self._flags:
            flags.release()
        for optimizer in self._optimizers:
            settle_state(optimizer)

    def displace(self) -> None:
        """Revert the plan for another loop, until its own loop continues."""
        self.revert()
        for layer, forward in _replaced(self._model):
            if forward.plan is self:  # another plan was applied on top, and has put it back
                forward.take_out(layer)
        if self.plan.channels_last:
            to_memory_format([self._model], self._optimizers, torch.contiguous_format)
        self.is_displaced = True

    def is_alone(self) -> bool:
        """Whether no other plan is applied to the model and its optimizers."""
        return all(each.plan in (None, self) for each in _held(self._model, self._optimizers))

    def around(self) -> AbstractContextManager[Any]:
        """A context manager for one step, which restores PyTorch's flags at its end."""
        if not self._switching:
            return _NOTHING
        contexts = [context for lever in self._switching if (context := lever.around(self.plan)) is not None]
        return contexts[0] if len(contexts) == 1 else _nested(contexts)

    def inputs(self, batch: Any) -> Any:
        """The batch in the form that the plan takes, such as another memory format."""
        for lever in self._feeding:
            batch = lever.inputs(batch, self.plan)
        return batch


def displace_plans(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Revert the plans of other loops, alive or not, on a model or its optimizers."""
    done: set[AppliedPlan] = set()
    while plans := [each.plan for each in _held(model, optimizers) if each.plan not in (None, *done)]:
        done.add(plans[0])
        plans[0].displace()  # under it another one may show
    for layer in model.modules():
        left = vars(layer).get("forward")  # in a copy of a model: its own, by a way round, which levers would respect
        if isinstance(left, MethodType) and left.__func__ is type(layer).forward and left.__self__ is layer:
            del vars(layer)["forward"]


def _held(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[LayerForward | PlannedFlags]:
    flags = map(PlannedFlags.held, optimizers)
    return [*(forward for _, forward in _replaced(model)), *(each for each in flags if each is not None)]


def _replaced(model: nn.Module) -> list[tuple[nn.Module, LayerForward]]:
    """The layers whose `forward` a lever has replaced, with that."""
    every = ((layer, vars(layer).get("forward")) for layer in model.modules())
    return [(layer, forward) for layer, forward in every if isinstance(forward, LayerForward)]


@contextmanager
def _nested(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
