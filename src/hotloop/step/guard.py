"""An optimizer step that survives running out of memory: in parts, each with a snapshot before."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import global_step_hooks, step_hooks
from hotloop.device.backend import backend_of
from hotloop.memory.oom import ATTEMPTS, clear, half_updated, is_out_of_memory
from hotloop.memory.usage import main_memory_left
from hotloop.values.kinds import CONTAINERS
from hotloop.values.snapshot import Snapshot
from hotloop.values.tree import changeable_in

PART = 64 * 2**20  # bytes of weights that are updated together
PLENTY = 16  # times the weights: more than any optimizer of PyTorch keeps and computes with
_TOGETHER = ("LBFGS",)  # optimizers of PyTorch whose weights depend on one another


@contextmanager
def guarded(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Make steps of these optimizers all or nothing inside the block."""
    before = [(optimizer, vars(optimizer).get("step")) for optimizer in optimizers]  # a scheduler may have wrapped it
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


def is_plenty(optimizers: Sequence[Optimizer], device: torch.device) -> bool:
    """Whether the free memory surely holds all that steps allocate; what others than PyTorch's take is not known."""
    backend = backend_of(device)
    unused = main_memory_left() if backend.is_host else backend.free_memory()
    if unused is None or not all(map(_is_separable, optimizers)):
        return False
    weights = (weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"])
    needed: int = PLENTY * sum(weight.nbytes for weight in weights)
    return unused > needed


def guarded_step(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """`step()`, such that running out of memory in the middle of it leaves no weight changed twice.

    Most optimizers update each weight by itself, so that they can do it in parts, to the same bits. Of each part a
    snapshot is kept until it is done; a part that fails is restored and done again in halves.
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
    """Try several times; the last attempt may raise."""
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
    """A step, all or nothing; returns whether memory sufficed."""
    before: Snapshot | None = None
    try:
        before = _snapshot(optimizer, weights)
        step()
    except Exception as error:
        if before is not None:
            before.restore()
        if last or not is_out_of_memory(error):
            raise
        return False
    return True


def _snapshot(optimizer: Optimizer, weights: Sequence[nn.Parameter]) -> Snapshot:
    """A snapshot of weights, their gradients, which some optimizers change too, and the optimizer's state of them."""
    states = [optimizer.state[weight] for weight in weights if weight in optimizer.state]
    gradients = [weight.grad.detach() for weight in weights if weight.grad is not None]
    inside = [part for state in states for part in changeable_in(state)]
    kept = [part for part in inside if isinstance(part, Tensor)]
    containers = [part for part in inside if CONTAINERS[type(part)]]
    before = Snapshot().gradients(weights).items([optimizer.state, *containers, *optimizer.param_groups])
    return before.values([*(weight.detach() for weight in weights), *kept, *gradients])


def _parts(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Weights in parts of some size; those without a gradient are included, since the optimizer skips them."""
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
    """Whether an optimizer updates each weight separately and has no step hooks."""
    kind, hooks = type(optimizer), [*step_hooks(optimizer), *global_step_hooks()]
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in _TOGETHER and not hooks
