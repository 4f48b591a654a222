"""How an optimizer computes (`fused`, `foreach`, `capturable`), and where it has its state: the affair of a plan."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hotloop._torch import COUNTS, global_step_hooks, step_hooks
from hotloop.levers.base import Undo

FLAGS = ("fused", "foreach", "capturable")

_NOTHING = nullcontext()

_AS_PLANNED = ContextVar("_AS_PLANNED", default=False)
_HELD: "WeakKeyDictionary[Optimizer, ref[PlannedFlags]]" = WeakKeyDictionary()  # which the optimizer's hooks keep alive


def set_flags(group: dict[str, Any], **flags: Any) -> Undo:
    """Set those flags of an optimizer's parameter group that it has; the call that undoes it."""
    wanted = {name: value for name, value in flags.items() if name in group}
    before = {name: group[name] for name in wanted}
    group.update(wanted)
    return partial(group.update, before)


class PlannedFlags:
    """The flags of an optimizer that a plan is about to set.

    A `state_dict` that a person asks for has their own flags, as it may be loaded where there is no GPU, and one that
    they load leaves the plan's.
    """

    def __init__(self, optimizer: Optimizer, plan: Any) -> None:
        self._optimizer = optimizer
        self.plan = plan  # the `AppliedPlan` that sets them, which lives as long as it does
        self._own = self._planned = _flags_in(optimizer)
        self._hooks: list[RemovableHandle] = []

    def hold(self) -> None:
        """The plan has set them."""
        self._planned = _flags_in(self._optimizer)
        if self._planned != self._own:
            self._hooks = [
                self._optimizer.register_state_dict_post_hook(self._tell),
                self._optimizer.register_load_state_dict_post_hook(self._keep),
            ]
            _HELD[self._optimizer] = ref(self)

    def release(self) -> None:
        """The plan has reverted them; in groups that were loaded meanwhile it could not."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            _set_flags(self._optimizer.param_groups, *self._own)
            _HELD.pop(self._optimizer, None)
        self._hooks = []

    @classmethod
    def held(cls, optimizer: Optimizer) -> "PlannedFlags | None":
        """Those of an optimizer now; None where no plan has set any."""
        found = _HELD.get(optimizer)
        return None if found is None else found()

    def leave(self, number: int) -> bool:
        """Restore the person's flags in one parameter group; False where they had asked for the fused kernel."""
        groups, defaults = self._own
        own = groups[number] if number < len(groups) else defaults
        self._optimizer.param_groups[number].update(own)
        settle_state(self._optimizer)
        return not own.get("fused")

    def _tell(self, optimizer: Optimizer, told: dict[str, Any]) -> None:
        if _AS_PLANNED.get():
            return
        _set_flags(told["param_groups"], *self._own)
        on_host = [group["params"] for group in told["param_groups"] if not is_counted_on_device(group)]
        for number in (number for numbers in on_host for number in numbers):
            kept = told["state"].get(number)
            if isinstance(kept, dict):  # the optimizer's own
                counts = {name: kept[name].cpu() for name in COUNTS if isinstance(kept.get(name), Tensor)}
                told["state"][number] = {**kept, **counts}

    def _keep(self, optimizer: Optimizer) -> None:
        _set_flags(optimizer.param_groups, *self._planned)
        settle_state(optimizer)


@contextmanager
def told_as_planned() -> Iterator[None]:
    """A `state_dict` that is asked for in here is as the plan has it, so that nothing waits for the device."""
    token = _AS_PLANNED.set(True)
    try:
        yield
    finally:
        _AS_PLANNED.reset(token)


def is_counted_on_device(group: Mapping[str, Any]) -> bool:
    """Whether Adam and its kin count the steps of a group on the device, where their kernels read it."""
    return bool(group.get("fused") or group.get("capturable"))


def settle_state(optimizer: Optimizer) -> None:
    """Put the state where the update reads it: Adam and its kin count on the host, their kernels on the device.

    Fused kernels go through a weight and its state side by side, so these have the same strides; a state that was
    loaded may have others.
    """
    for group in optimizer.param_groups:
        there = is_counted_on_device(group)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if not isinstance(state, dict):
                continue
            for name in COUNTS:
                if isinstance(count := state.get(name), Tensor):
                    # A kernel reads 32 bits; elsewhere the count keeps the type that it has.
                    state[name] = count.to(parameter.device, torch.float32) if there else count.cpu()
            for name, value in state.items() if group.get("fused") else ():
                if isinstance(value, Tensor):
                    state[name] = _as_its_weight(value, parameter)


def fused_steps(
    optimizers: Iterable[Optimizer], *, has_scaler: bool = False, is_scaled: bool = False, by_hand: bool = False
) -> AbstractContextManager[None]:
    """Around steps: restore what fused kernels rely on, such as strides, which a person's hooks may have changed.

    A parameter group with a sparse gradient, which no kernel takes, goes on without one, unless `has_scaler`: a scaler
    leaves it to the kernel to skip steps. Optimizers with hooks of their own do it once more after these. `is_scaled`:
    gradients are still multiplied by the scale of fp16. `by_hand`: around code of the person, which may step an
    optimizer or not.
    """
    fused = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("fused"):
                fused.append(optimizer)
                break
    prepare = partial(_prepare, has_scaler=has_scaler, is_scaled=is_scaled)
    return _prepared(fused, prepare, by_hand=by_hand) if fused else _NOTHING


@contextmanager
def _prepared(optimizers: Sequence[Optimizer], prepare: Callable[..., None], *, by_hand: bool) -> Iterator[None]:
    added = []
    for optimizer in optimizers:
        if not by_hand:
            prepare(optimizer)
        if by_hand or step_hooks(optimizer) or global_step_hooks():
            added.append(optimizer.register_step_pre_hook(prepare))
    try:
        yield
    finally:
        for hook in added:
            hook.remove()


def _prepare(optimizer: Optimizer, *_: Any, has_scaler: bool, is_scaled: bool) -> None:
    for number, group in enumerate(optimizer.param_groups):
        if group.get("fused"):
            held = None if has_scaler else PlannedFlags.held(optimizer)
            if not _settle_strides(optimizer, group["params"]) and held is not None and held.leave(number):
                continue
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
                _begin_momentum(optimizer, group, is_scaled=is_scaled)


def _settle_strides(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Kernels go through a weight, its gradient and its state side by side, whatever strides they have.

    Returns whether there is a kernel for all of them: a gradient that is sparse is seen only once it is there.
    """
    states, has_kernel = optimizer.state, True
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse or gradient.is_complex():
            has_kernel = False
            continue
        strides = parameter.stride()
        if gradient.stride() != strides:
            parameter.grad = _as_its_weight(gradient, parameter)
        if parameter not in states or len(strides) < 2:
            continue
        state = states[parameter]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.stride() != strides:
                state[name] = _as_its_weight(value, parameter)
    return has_kernel


@torch.no_grad()
def _begin_momentum(optimizer: Optimizer, group: Mapping[str, Any], *, is_scaled: bool) -> None:
    """SGD's kernel begins with all weights of a group or with none: those that come later, as from frozen layers, get
    the momentum that makes their first step what it is by hand.
    """
    trained = [each for each in group["params"] if each.grad is not None]
    late = [each for each in trained if optimizer.state.get(each, {}).get("momentum_buffer") is None]
    for parameter in late if len(late) < len(trained) else ():
        buffer = torch.zeros_like(parameter)
        if group["dampening"] and not is_scaled:  # of the first gradient by hand nothing is lost to it
            buffer += -parameter.grad if group["maximize"] else parameter.grad
            buffer.add_(parameter, alpha=group["weight_decay"]).mul_(group["dampening"] / group["momentum"])
        optimizer.state[parameter]["momentum_buffer"] = buffer


@torch.no_grad()
def _as_its_weight(value: Tensor, weight: Tensor) -> Tensor:
    """A gradient or a state with the strides of its weight."""
    if value.shape != weight.shape or strides_of(value) == strides_of(weight):
        return value
    return torch.empty_like(weight, dtype=value.dtype).copy_(value)


def strides_of(tensor: Tensor) -> list[tuple[int, int]]:
    """Those that mean something, each with the size of its dimension."""
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


_Flags = tuple[list[dict[str, Any]], dict[str, Any]]  # of each group, and of one that is added later


def _flags_in(optimizer: Optimizer) -> _Flags:
    groups = [{name: group[name] for name in FLAGS if name in group} for group in optimizer.param_groups]
    return groups, {name: optimizer.defaults[name] for name in FLAGS if name in optimizer.defaults}


def _set_flags(groups: list[dict[str, Any]], known: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    for group, flags in zip_longest(groups, known):
        if group is not None:
            group.update({name: value for name, value in (flags or defaults).items() if name in group})
