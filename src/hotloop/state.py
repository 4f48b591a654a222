"""`State`: everything that a training step changes, copied aside and put back to the bit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop.placement import tensors_in

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


class CannotCopy(Exception):
    """A tensor that cannot be copied aside: it has no plain memory of its own."""


@dataclass(frozen=True)
class _ModuleAttributes:
    """What a module holds besides its weights."""

    module: nn.Module
    values: dict[str, Any]  # plain numbers, words and tensors
    buffers: dict[str, Tensor | None]  # which tensors are registered, not their values
    names: frozenset[str]  # of everything

    @classmethod
    def of(cls, module: nn.Module) -> "_ModuleAttributes":
        return cls(module, _own_values(module), dict(module._buffers), frozenset(vars(module)))

    def put(self) -> None:
        attributes = vars(self.module)
        for added in attributes.keys() - self.names:
            del attributes[added]
        attributes.update(self.values)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)


@dataclass
class _Held:
    """A tensor that the model holds, and the memory that it shall have."""

    owner: Tensor
    data: Tensor
    grad: Tensor | None


class State:
    """The values of modules and optimizers at one moment.

    Several states can exist side by side; `put` makes one of them the values of the modules. Only pointers change
    hands then, so the state that was there before stays exactly as it was. Tensors that share memory (tied weights,
    the flat weights of an RNN) share it in a copy too.
    """

    def __init__(
        self,
        held: list[_Held],
        modules: list[_ModuleAttributes],
        optimizers: list[tuple[Optimizer, dict[Any, Any], list[dict[str, Any]]]],
    ) -> None:
        self._held = held
        self._modules = modules
        self._optimizers = optimizers

    @classmethod
    def of(cls, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> "State":
        """The present values themselves, not a copy of them."""
        inner = list(dict.fromkeys(m for module in modules for m in module.modules()))
        owned = {id(t): t for m in inner for t in [*m._parameters.values(), *m._buffers.values()] if t is not None}
        owned |= {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        return cls(
            [_Held(t, t.data, t.grad if t.is_leaf else None) for t in owned.values()],
            [_ModuleAttributes.of(module) for module in inner],
            [(o, _shallow(o.state), [_settings(group) for group in o.param_groups]) for o in optimizers],
        )

    def copy(self) -> "State":
        """The same values in memory of their own."""
        if any(is_lazy(held.owner) for held in self._held):
            raise CannotCopy("a weight whose shape the first batch decides")
        memory: dict[int, torch.UntypedStorage] = {}
        return State(
            [_Held(h.owner, _copy(h.data, memory), _copy_any(h.grad, memory)) for h in self._held],
            [replace(held, values=_copy_any(held.values, memory)) for held in self._modules],
            [(o, _copy_any(state, memory), _copy_any(groups, memory)) for o, state, groups in self._optimizers],
        )

    def laid_out(self, form: torch.memory_format) -> "State":
        """The same values with four-dimensional tensors in a memory format, such as channels_last."""
        return State(
            [_Held(h.owner, _relaid(h.data, form), _relaid(h.grad, form)) for h in self._held],
            self._modules,
            [(o, _relaid(state, form), groups) for o, state, groups in self._optimizers],
        )

    def put(self) -> None:
        """Make these the values of the modules and optimizers."""
        for held in self._held:
            held.owner.data = held.data
            held.owner.grad = held.grad
        for attributes in self._modules:
            attributes.put()
        for optimizer, state, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(_shallow(state))
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that a copy would need."""
        optimizers = (t for _, state, _ in self._optimizers for _, t in tensors_in(state))
        return sum(t.nbytes for t in [*(h.data for h in self._held), *optimizers])


def _own_values(module: nn.Module) -> dict[str, Any]:
    """Plain numbers, words and tensors that a module holds as attributes and may change while it runs."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
    }


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _shallow(state: Any) -> dict[Any, Any]:
    """An optimizer's state with dicts of its own, so that what a step adds does not reach the other."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}


def _copy_any(value: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, Tensor):
        return _copy(value, memory)
    if isinstance(value, dict):
        return {key: _copy_any(item, memory) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_any(item, memory) for item in value]
    return value


def _copy(tensor: Tensor, memory: dict[int, torch.UntypedStorage]) -> Tensor:
    """A tensor of the same values, sizes and strides; what shares memory with it shares its copy."""
    data = tensor.detach()
    if data.layout != torch.strided or type(data) not in (Tensor, nn.Parameter, nn.Buffer) or data.is_meta:
        raise CannotCopy(f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}")
    storage = data.untyped_storage()
    if storage._cdata not in memory:
        memory[storage._cdata] = storage.clone()
    empty = torch.empty(0, dtype=data.dtype, device=data.device)
    return empty.set_(memory[storage._cdata], data.storage_offset(), data.size(), data.stride())


def _relaid(value: Any, form: torch.memory_format) -> Any:
    if isinstance(value, Tensor):
        return value.contiguous(memory_format=form) if value.dim() == 4 else value
    if isinstance(value, dict):
        return {key: _relaid(item, form) for key, item in value.items()}
    return value
