"""An optimizer's step that can be taken back: in parts, each copied aside before it is changed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.memory.oom import clear, is_out_of_memory
from hotloop.memory.survive import ATTEMPTS

PART = 64 * 2**20  # bytes of weights that are updated together
_TOGETHER = ("LBFGS",)  # optimizers of PyTorch whose weights depend on one another


def guarded_step(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """`step()`, such that running out of memory in the middle of it leaves no weight changed twice.

    Most optimizers update each weight by itself, so that they can do it in parts, to the same bits. Of each part a
    copy is kept until it is done; a part that fails is put back and done again in halves.
    """
    if not _is_separable(optimizer):
        _transact(optimizer, [p for group in optimizer.param_groups for p in group["params"]], step)
        return
    groups = optimizer.param_groups
    try:
        for group in groups:
            everything = group["params"]
            optimizer.param_groups = [group]
            try:
                for part in _parts(everything):
                    _update(optimizer, group, part, step)
            finally:
                group["params"] = everything
    finally:
        optimizer.param_groups = groups


def _update(optimizer: Optimizer, group: dict[str, Any], part: list[nn.Parameter], step: Callable[[], Any]) -> None:
    """Update some of the weights of a group."""
    group["params"] = part
    try:
        _transact(optimizer, part, step, attempts=1 if len(part) > 1 else ATTEMPTS)
        return
    except Exception as error:
        if len(part) == 1 or not is_out_of_memory(error):
            raise
    half = len(part) // 2
    _update(optimizer, group, part[:half], step)
    _update(optimizer, group, part[half:], step)


def _transact(
    optimizer: Optimizer, weights: Sequence[nn.Parameter], step: Callable[[], Any], attempts: int = ATTEMPTS
) -> None:
    """All of a step or nothing of it."""
    for last in range(attempts - 1, -1, -1):
        copies: list[_Copy] = []
        try:
            copies.extend(_Copy(optimizer, weight) for weight in weights)
            step()
            return
        except Exception as error:
            for copy in copies:  # a copy is complete or not there
                copy.put()
            if not last or not is_out_of_memory(error):
                raise
        del copies
        clear(weights[0].device)


class _Copy:
    """A weight and what the optimizer keeps for it."""

    def __init__(self, optimizer: Optimizer, weight: nn.Parameter) -> None:
        self._optimizer, self._weight = optimizer, weight
        self._values = weight.detach().clone()
        state = optimizer.state.get(weight)
        self._state = None if state is None else dict(state)
        self._tensors = [(t, t.clone()) for t in (self._state or {}).values() if isinstance(t, Tensor)]

    @torch.no_grad()
    def put(self) -> None:
        self._weight.copy_(self._values)
        for tensor, values in self._tensors:
            tensor.copy_(values)
        if self._state is None:
            self._optimizer.state.pop(self._weight, None)
        else:
            self._optimizer.state[self._weight] = self._state


def _parts(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Weights in parts of some size; those that have no gradient go along, since the optimizer leaves them alone."""
    part: list[nn.Parameter] = []
    size = 0
    for weight in weights:
        if part and size + weight.nbytes > PART:
            yield part
            part, size = [], 0
        part.append(weight)
        size += weight.nbytes
    if part:
        yield part


def _is_separable(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates each weight by itself and nobody listens to its steps."""
    kind = type(optimizer)
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in _TOGETHER and not hooks
