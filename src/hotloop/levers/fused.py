"""The optimizer updates all weights in one kernel."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop._torch import UNSCALES, is_simulated_gpu
from hotloop.device.backend import backend_of
from hotloop.levers.base import Lever, LeverRule, LeverTarget, Undo, set_attribute
from hotloop.levers.flags import FLAGS, set_flags, strides_of
from hotloop.plan import Plan

SIZES = 1024, 1031  # numbers in the weights of a comparison: whole vectors, and a rest beside them
UPDATES = 3  # the first begins the momentum, the others use it
TOLERANCE = 1e-3  # of a weight, at least: an update in fp32 corrects Adam's bias to about 1e-4
ROUNDINGS = 8  # times the precision of the weights, where that is more

_COMPARED: dict[tuple[object, ...], str | None] = {}


class FusedLever(Lever):
    """**What it does.** An optimizer in its plain form launches several kernels for each group of weights. The fused
    one reads and writes each weight once, in one kernel for many tensors.

    **The numbers.** Tier B: the same formula in another order of operations, so the last bits of the weights may
    differ. Losses and gradients are computed as before, so there is nothing to ask [the
    gate](../tuning.md#the-gate-for-tier-b). The update has a gate of its own: before the kernel is used, three updates
    of 2,055 numbers, with your optimizer's options, precision and device, must be those of the plain form. So SGD with
    bf16 or fp16 weights on a CPU stays unfused in PyTorch 2.13, whose kernel skips most of them.

    **What it needs.** Adam, AdamW, Adagrad or SGD of PyTorch, or any optimizer with a `fused` flag, over plain
    floating-point weights without gaps in memory, unlike slices of other tensors. It works on a CPU too; for Adagrad on
    CUDA it needs a newer PyTorch than 2.11.

    **What it costs.** Nothing to pull; the gate takes some milliseconds, once. On a GPU a run has it from its first
    step: in a new process on an H200, Adam in its plain form loaded kernels for 67 ms in its first update, and its
    fused kernel in less than 6 ms.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", fused=True))
    ```

    An optimizer built with `fused=True` is fused already; leave it out of the plan then. One without such a kernel is
    an error that gives the reason, and so is one whose kernel is wrong here; for an optimizer that you built with
    `fused=True` yourself that is a `PlanWarning`.

    The optimizer's state is the same in both forms, so it stays valid when the lever is dropped.

    **When it does not help.** If the update is a small part of the step. A captured step has no launches left to save.


    """

    name = "fused"
    order = 130
    tier = "B"
    what = "one kernel updates all weights"
    cost = "nothing"
    undo = "the optimizer's flag is restored"
    trust = 6
    changes_gradients = False
    begins_on = ("cuda",)
    sets = "fused", True
    rule = LeverRule(
        "the optimizer has a fused kernel",
        lambda facts: True,
        "H200: a GPT of 124M parameters went from 348,000 to 361,000 tokens/s; on a CPU, Adam updates an MLP 2 to 4"
        " times as fast",
    )

    def in_words(self, plan: Plan) -> str:
        return "fused optimizer"

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        for optimizer in target.optimizers:
            if all(group.get("fused") for group in optimizer.param_groups):
                return f"{type(optimizer).__name__} is fused already"
        if not backend_of(target.device).has_fused_optimizers:
            return f"there is no fused kernel for {target.device.type}"
        return None

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        for name, layer in target.model.named_modules():
            if getattr(layer, "sparse", False) is True:
                return f"{name or type(layer).__name__} has sparse gradients"
        return next(filter(None, map(without_fused_kernel, target.optimizers)), None)

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if "fused" in group:
                    yield from fuse(optimizer, group)


def without_fused_kernel(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot update all its weights in one kernel; None where it can."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if "fused" not in group:
            return f"{name} has no fused kernel"
        if group.get("differentiable"):
            return f"{name} is differentiable"
        if any(not p.is_floating_point() or p.layout != torch.strided for p in group["params"]):
            return f"{name} holds weights that are not plain floating-point numbers"
        if any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
            return f"{name} is given sparse gradients"
        known = [p for p in group["params"] if not is_lazy(p)]
        if not all(map(_is_dense, known)):
            return f"{name} holds weights with gaps in memory, such as slices"
    return wrong_fused_kernel(optimizer)


def wrong_fused_kernel(optimizer: Optimizer) -> str | None:
    """Why the fused kernel of an optimizer must not be used, though there is one; None where it may."""
    for group in optimizer.param_groups:
        known = [p for p in group["params"] if p.is_floating_point() and not is_lazy(p)]
        for device, dtype in dict.fromkeys((p.device, p.dtype) for p in known):
            if why := _departure(type(optimizer), group, device, dtype):
                return why
    return None


def _departure(kind: type[Optimizer], group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the fused kernel does not compute the plain update here; None where it does.

    A few updates of small weights of this kind, with the options of the group, are compared with the plain form in
    float64 on the host, which loads no kernels. Once in a process.
    """
    if is_simulated_gpu():
        return None
    options = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr", *FLAGS)}
    key = kind, device, dtype, repr(sorted(options.items()))
    if key not in _COMPARED:
        what = f"fused kernel for {kind.__name__} with {str(dtype).removeprefix('torch.')} weights on {device.type}"
        try:
            plain = _updated(kind, options, torch.device("cpu"), torch.float64, of=dtype, fused=False)
            fused = _updated(kind, options, device, dtype, of=dtype, fused=True)
        except (RuntimeError, TypeError, AttributeError, LookupError):
            _COMPARED[key] = f"this PyTorch has no {what}"
        else:
            allowed = max(TOLERANCE, ROUNDINGS * torch.finfo(dtype).eps)
            away = ((fused - plain).abs() / (1 + plain.abs())).max().item()
            wrong = f"the {what} is wrong in this PyTorch: its update is not that of the plain form"
            _COMPARED[key] = None if away <= allowed else wrong
    return _COMPARED[key]


@torch.no_grad()
def _updated(
    kind: Callable[..., Optimizer],
    options: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    *,
    of: torch.dtype,
    fused: bool,
) -> Tensor:
    """Weights of precision `of` after a few updates, in float64 on the host. No hook of optimizers is called."""
    weights = [torch.linspace(-1, 1, size, dtype=of, device="cpu").to(device, dtype) for size in SIZES]
    optimizer = kind([{**options, "params": weights, "lr": 1.0, "fused": fused, "foreach": False}])
    step = inspect.unwrap(type(optimizer).step)
    for weight, size in zip(weights, SIZES, strict=True):
        numbers = torch.linspace(-2, 2, size, dtype=of, device="cpu")
        weight.grad = (numbers + 2 - 4 * (numbers < 0)).to(device, dtype)  # none has a square that is rounded away
    for _ in range(UPDATES):
        step(optimizer)
    return torch.cat([weight.to("cpu", torch.float64) for weight in weights])


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory, in any order of its dimensions. Fused kernels for a CPU do not ask."""
    filled = 1
    for stride, size in sorted(strides_of(tensor)):
        if stride != filled:
            return False
        filled *= size
    return True


def fuse(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[Undo]:
    """Let an optimizer update a parameter group by its fused kernel; the calls that undo it."""
    for flags in (group, optimizer.defaults):  # a group that is added later takes the defaults
        yield set_flags(flags, fused=True, foreach=False)
    yield set_attribute(optimizer, UNSCALES, True)  # as the optimizer itself does where it is built with `fused=True`
