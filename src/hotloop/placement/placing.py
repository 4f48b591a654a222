"""`place` moves a model once, takes the optimizer's state along, and proves that nothing was left behind."""

import re
import warnings
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import COUNTS, OF_MODULES
from hotloop.device import as_device, device_error
from hotloop.errors import BadArgument, LeftBehind, LeftBehindWarning
from hotloop.placement.moving import move, shape_of
from hotloop.printing.text import an, shorten
from hotloop.values.kinds import WORD_KINDS
from hotloop.values.tree import tensors_in

M = TypeVar("M", bound=nn.Module)


def place(model: M, device: str | torch.device, *optimizers: Optimizer, strict: bool = False) -> M:
    """Move `model` to `device` and prove it: every parameter and buffer is there.

    An optimizer that was built before the move keeps working: hand it in and its state follows. Tensors that the
    model holds as plain attributes do not move with it (PyTorch does not know them); each is named with the line
    that fixes it, as a warning, or with `strict=True` as an error.

    >>> place(nn.Linear(2, 2), "cpu").weight.device
    device(type='cpu')
    """
    if not isinstance(model, nn.Module):
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise BadArgument(
                f"the model is the class {model.__name__}", fix=f"create an instance: {model.__name__}(…)"
            )
        raise BadArgument(f"the model is {an(type(model).__name__)}", fix="give a torch.nn.Module")
    target = resolve(device)
    unmade = [name for name, tensor in _registered(model) if tensor.is_meta]
    if unmade and target.type != "meta":
        raise BadArgument(
            f"the model has no values yet: {shorten(unmade)} on the meta device",
            fix=f'model.to_empty(device="{target}"), then load or initialise the weights',
        )
    before = dict(model.named_parameters(remove_duplicate=False))
    model.to(target)
    renamed = {id(before[name]): p for name, p in model.named_parameters(remove_duplicate=False)}
    for optimizer in optimizers:
        _bring_along(optimizer, renamed)
    stayed = [name for name, tensor in _registered(model) if tensor.device != target]
    if stayed:
        raise LeftBehind(
            f"after model.to({str(target)!r}) these are still elsewhere: {shorten(stayed)}",
            fix="look for a module that overrides `_apply` or `to`; it must move what it holds",
        )
    left = list(_left_behind(model, target))
    if left:
        _tell(left, target, strict)
    return model


def resolve(device: str | torch.device) -> torch.device:
    """The device with its index, as tensors report it: `cuda` is `cuda:0` or whichever is current."""
    target = as_device(device)
    try:
        return torch.empty(0, device=target).device
    except (AssertionError, RuntimeError) as error:
        raise device_error(target, error) or error from error


def _registered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _bring_along(optimizer: Optimizer, moved: dict[int, nn.Parameter]) -> None:
    """Point the optimizer at the parameters as they are after the move, and move its state beside them."""
    for group in optimizer.param_groups:
        # Adam and its kin keep their counts on the host unless a kernel on the device reads them.
        on_device = bool(group.get("fused") or group.get("capturable"))
        for i, old in enumerate(group["params"]):
            param = group["params"][i] = moved.get(id(old), old)
            if state := optimizer.state.pop(old, None):
                optimizer.state[param] = {
                    key: value if key in COUNTS and not on_device else move(value, param.device)
                    for key, value in state.items()
                }


def _left_behind(model: nn.Module, target: torch.device) -> Iterator[tuple[str, str, Tensor]]:
    """Tensors on another device that modules hold as plain attributes: (module path, attribute, tensor)."""
    seen: set[int] = set()  # a configuration is in every layer
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in OF_MODULES or type(value) in WORD_KINDS or isinstance(value, nn.Module):
                continue
            for where, tensor in tensors_in(value, name, seen):
                if tensor.device != target:
                    yield path, where, tensor


def _tell(left: list[tuple[str, str, Tensor]], target: torch.device, strict: bool) -> None:
    lines = []
    for path, where, tensor in left:
        owner = f"model.{path}" if path else "model"
        lines.append(f"{owner}.{where}: {shape_of(tensor)} on {tensor.device}")
        lines.append(f"  fix: {_registration(where, tensor)}")
    kind = "a plain attribute" if len(left) == 1 else "plain attributes"
    message = f"the model moved to {target}, but {kind} stayed behind:\n  " + "\n  ".join(lines)
    if strict:
        raise LeftBehind(message)
    warnings.warn(message, LeftBehindWarning, stacklevel=3)


def _registration(where: str, tensor: Tensor) -> str:
    """The line in `__init__` that makes PyTorch know the tensor."""
    if where.isidentifier():
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return f"self.{where} = nn.Parameter({where})"
        return f'self.register_buffer("{where}", …, persistent=False) instead of self.{where} = …'
    name = re.split(r"[\[.]", where, maxsplit=1)[0]
    if isinstance(tensor, nn.Parameter):
        container = "ParameterDict" if "['" in where else "ParameterList"
        return f"self.{name} = nn.{container}({name})"
    flat = "".join(c if c.isalnum() else "_" for c in where).replace("__", "_").strip("_")
    return f'self.register_buffer("{flat}", {where}, persistent=False), for each tensor in self.{name}'
