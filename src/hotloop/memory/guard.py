"""An optimizer's step that can be taken back: in parts, each copied aside before it is changed."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as of_torch

from hotloop.memory.oom import ATTEMPTS, clear, half_updated, is_out_of_memory
from hotloop.placement import tensors_in

PART = 64 * 2**20  # bytes of weights that are updated together
_TOGETHER = ("LBFGS",)  # optimizers of PyTorch whose weights depend on one another


def guarded_step(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """`step()`, such that running out of memory in the middle of it leaves no weight changed twice.

    Most optimizers update each weight by itself, so that they can do it in parts, to the same bits. Of each part a
    copy is kept until it is done; a part that fails is put back and done again in halves.
    """
    if not _is_separable(optimizer):
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        _insist(partial(_transact, optimizer, weights, step), weights[0].device)
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
    transact = partial(_transact, optimizer, [weight for weight in part if weight.grad is not None], step)
    if len(part) == 1:
        _insist(transact, part[0].device)
        return
    if transact():
        return
    clear(part[0].device)
    half = len(part) // 2
    _update(optimizer, group, part[:half], step)
    _update(optimizer, group, part[half:], step)


def _insist(transact: Callable[..., bool], device: torch.device) -> None:
    """Several attempts, the last of which may fail."""
    for _ in range(ATTEMPTS - 1):
        if transact():
            return
        clear(device)
    try:
        transact(last=True)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise half_updated(error) from error  # parts before this one are done, and must not be done again


def _transact(
    optimizer: Optimizer, weights: Sequence[nn.Parameter], step: Callable[[], Any], *, last: bool = False
) -> bool:
    """All of a step or nothing of it: whether memory sufficed."""
    copies: list[_Copy] = []
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        copies.extend(_Copy(optimizer, weight) for weight in weights)
        step()
    except Exception as error:
        for copy in copies:  # a copy is complete or not there
            copy.put()
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)  # some count their steps there
        if last or not is_out_of_memory(error):
            raise
        return False
    return True


class _Copy:
    """A weight, its gradient, which some optimizers change too, and what the optimizer keeps for it."""

    def __init__(self, optimizer: Optimizer, weight: nn.Parameter) -> None:
        self._optimizer, self._weight, self._grad = optimizer, weight, weight.grad
        self._state: dict[str, Any] | None = None
        if weight in optimizer.state:
            self._state = {key: _own(value) for key, value in optimizer.state[weight].items()}
        tensors = [weight.detach(), *(t for _, t in tensors_in(self._state))]
        if self._grad is not None:
            tensors.append(self._grad.detach())
        self._values = [(tensor, _aside(tensor)) for tensor in tensors]

    @torch.no_grad()
    def put(self) -> None:
        self._weight.grad = self._grad
        for tensor, values in self._values:
            tensor.copy_(values)
        if self._state is None:
            self._optimizer.state.pop(self._weight, None)
        else:
            there = self._optimizer.state[self._weight]
            there.clear()
            there.update(self._state)


def _aside(tensor: Tensor) -> Tensor:
    """A copy; in main memory where the device has no room for one."""
    try:
        return tensor.clone()
    except Exception as error:
        if tensor.device.type == "cpu" or not is_out_of_memory(error):
            raise
    return tensor.cpu()


def _own(value: Any) -> Any:
    """A list or dict of its own, since a step may add to it."""
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    return [_own(item) for item in value] if isinstance(value, list) else value


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
    anyones = of_torch._global_optimizer_pre_hooks or of_torch._global_optimizer_post_hooks
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in _TOGETHER and not hooks and not anyones
