"""Restores, after a block, the person's objects that moved to the simulated device in it."""

from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hotloop._torch import buffers_of, parameters_of
from hotloop.apps.simulate._torch import is_simulated, sole_owners


class Borrowed:
    """Parameters, buffers, gradients and optimizers' states as they were, with the values that they had."""

    def __init__(self) -> None:
        self._swapped: list[tuple[Tensor, Tensor]] = []  # a tensor, and one that holds what it was
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._states: dict[Optimizer, dict[Any, Any]] = {}
        self._new: WeakSet[Optimizer] = WeakSet()  # made in the block: whatever they hold is of the block

    def swapped(self, tensor: Tensor, before: Tensor) -> None:
        """A tensor is on the device now, and another object holds what it was."""
        if is_simulated(tensor) and not is_simulated(before):
            self._swapped.append((tensor, before))

    def moves(self, module: nn.Module) -> None:
        """A module is about to be moved."""
        for name, buffer in buffers_of(module).items():
            if buffer is not None and not is_simulated(buffer):
                self._buffers.append((module, name, buffer))
        for parameter in parameters_of(module).values():
            if parameter is not None and parameter.grad is not None and not is_simulated(parameter):
                self._gradients.append((parameter, parameter.grad))

    def made(self, optimizer: Optimizer) -> None:
        self._new.add(optimizer)

    def steps(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if optimizer not in self._new and optimizer not in self._states:
            self._states[optimizer] = {
                parameter: {name: _copied(value) for name, value in state.items()}
                for parameter, state in optimizer.state.items()
            }

    def restore(self) -> None:
        """Put everything back, the last first."""
        with sole_owners():  # graphs that still hold one are of the block, and done
            for tensor, before in reversed(self._swapped):
                with suppress(RuntimeError):  # somebody watches it, so it stays, and says what it is when it is used
                    torch.utils.swap_tensors(tensor, before)
        for parameter, gradient in self._gradients:
            if not is_simulated(parameter):
                parameter.grad = gradient
        for module, name, buffer in reversed(self._buffers):
            if is_simulated(buffers_of(module).get(name)):
                buffers_of(module)[name] = buffer
        for optimizer, state in self._states.items():
            optimizer.state.clear()
            optimizer.state.update(state)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not is_simulated(value) else value
