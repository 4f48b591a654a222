"""Who is told what happens on the simulated device, and the circumstances: phase, module, line."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hotloop.simulate.events import Listener, Operation, Place


class Teller:
    """Hands every event to all listeners, in order; being told is a thing that only ever happens one at a time."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def allocated(self, key: int, size: int, kind: str) -> None:
        for listener in self._listeners:
            listener.allocated(key, size, kind)

    def freed(self, key: int) -> None:
        for listener in self._listeners:
            listener.freed(key)

    def named(self, key: int, kind: str) -> None:
        for listener in self._listeners:
            listener.named(key, kind)

    def before(self, operation: Operation) -> None:
        for listener in self._listeners:
            listener.before(operation)

    def after(self, operation: Operation) -> None:
        for listener in self._listeners:
            listener.after(operation)

    def copied(self, size: int, direction: str, *, pinned: bool, blocking: bool, place: Place | None) -> None:
        for listener in self._listeners:
            listener.copied(size, direction, pinned=pinned, blocking=blocking, place=place)

    def waited(self, kind: str, place: Place | None) -> None:
        for listener in self._listeners:
            listener.waited(kind, place)

    def host(self, seconds: float) -> None:
        for listener in self._listeners:
            listener.host(seconds)

    def step(self) -> None:
        for listener in self._listeners:
            listener.step()


class Circumstances:
    """In which phase of training and in which module an operation runs."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names = WeakIdKeyDictionary()  # outermost module → path by the identity of each module in it
        self._current: list[dict[int, str]] = []
        self._of_node: dict[int, str] = {}  # autograd's sequence number → module of its forward
        self._optimizing = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> "Circumstances":
        modules = nn.modules.module
        self._hooks = [
            modules.register_module_forward_pre_hook(self._enters),
            modules.register_module_forward_hook(self._leaves, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def now(self, *, learns: bool) -> tuple[str, str]:
        """Phase and module; `learns` tells whether an operand requires a gradient."""
        node = torch._C._current_autograd_node()
        if node is not None and not self._stack:
            return "backward", self._of_node.get(node._sequence_nr(), "")
        if self._stack:
            module = self._stack[-1]
            if torch.is_grad_enabled():
                self._of_node[torch.autograd._get_sequence_nr() - 1] = module  # type: ignore[attr-defined]
            return ("forward" if node is None else "backward"), module
        if self._optimizing and not torch.is_grad_enabled():
            return "optimizer", ""
        return ("forward" if learns and torch.is_grad_enabled() else "other"), ""

    @property
    def accumulating(self) -> bool:
        """Whether a gradient is just being put into `.grad`."""
        node = torch._C._current_autograd_node()
        return node is not None and type(node).__name__ == "AccumulateGrad"

    def forget(self) -> None:
        """A step has ended: its graph is gone."""
        self._of_node.clear()

    def _enters(self, module: nn.Module, _inputs: Any) -> None:
        if not self._current:
            names = self._names.get(module)
            if names is None:
                names = {id(part): name for name, part in module.named_modules()}
                self._names[module] = names
            self._current.append(names)
        self._stack.append(self._current[-1].get(id(module)) or type(module).__name__)

    def _leaves(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()
        if not self._stack:
            self._current.clear()

    def _step_begins(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizing = 1

    def _step_ends(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizing = 0
