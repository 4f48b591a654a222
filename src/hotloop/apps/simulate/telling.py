"""Who is told what happens on the simulated device, and the circumstances: phase, module, line."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hotloop.apps.simulate._torch import current_node, next_sequence_number, sequence_number
from hotloop.apps.simulate.events import Listener, Operation
from hotloop.placement.sites import Site


class Teller:
    """Hands every event to all listeners, one event at a time.

    Memory may be freed while they hear of another event: the garbage collector runs at any moment. They hear of it
    after that one.

    `others` keep the memory of further GPUs, each that of one: there is a listener like it for the first.
    """

    def __init__(self, listeners: Sequence[Listener], others: Sequence[Listener] = ()) -> None:
        first = tuple(listeners)
        beside = tuple(each for each in first if not hasattr(each, "memory_stats"))
        self._hearing = [first, *((*beside, other) for other in others)]  # by device
        self._all = (*first, *others)
        self._elsewhere: dict[int, int] = {}  # memory that is not on the first device, and on which it is
        self._depth = 0  # events that listeners are being told
        self._freed: deque[int] = deque()  # memory of which they have not heard yet
        self.freeing = 0.0  # seconds that listeners took, in the middle of the script's own work

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            while self._depth == 1 and self._freed:
                key = self._freed.popleft()
                for listener in self._hearing[self._elsewhere.pop(key, 0)]:
                    listener.freed(key)
        finally:
            self._depth -= 1

    def allocated(self, key: int, size: int, kind: str, device: int = 0) -> None:
        if device:
            self._elsewhere[key] = device
        with self:
            for listener in self._hearing[device]:
                listener.allocated(key, size, kind)

    def freed(self, key: int) -> None:
        self._freed.append(key)
        if self._depth:
            return
        begun = time.perf_counter()
        with self:
            pass
        self.freeing += time.perf_counter() - begun

    def named(self, key: int, kind: str) -> None:
        with self:
            for listener in self._hearing[self._elsewhere.get(key, 0)]:
                listener.named(key, kind)

    def before(self, operation: Operation, device: int = 0) -> None:
        with self:
            for listener in self._hearing[device]:
                listener.before(operation)

    def after(self, operation: Operation, device: int = 0) -> None:
        with self:
            for listener in self._hearing[device]:
                listener.after(operation)

    def copied(self, size: int, direction: str, *, pinned: bool, blocking: bool, place: Site | None) -> None:
        with self:
            for listener in self._all:
                listener.copied(size, direction, pinned=pinned, blocking=blocking, place=place)

    def waited(self, kind: str, place: Site | None) -> None:
        with self:
            for listener in self._all:
                listener.waited(kind, place)

    def host(self, seconds: float, kind: str, workers: int = 0) -> None:
        with self:
            for listener in self._all:
                listener.host(seconds, kind, workers)

    def step(self) -> None:
        with self:
            for listener in self._all:
                listener.step()


class Circumstances:
    """In which phase of training and in which module an operation runs."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names = WeakIdKeyDictionary()  # outermost module → path by the identity of each module in it
        self._current: list[dict[int, str]] = []
        self._of_node: dict[int, str] = {}  # autograd's sequence number → module of its forward
        self.optimizing = False
        self.evaluated: Callable[[nn.Module], None] = lambda module: None  # told of calls in eval mode, no gradients
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
        node = current_node()
        if node is not None and not self._stack:
            return "backward", self._of_node.get(sequence_number(node), "")
        if self._stack:
            module = self._stack[-1]
            if torch.is_grad_enabled():
                self._of_node[next_sequence_number() - 1] = module
            return ("forward" if node is None else "backward"), module
        if self.optimizing and not torch.is_grad_enabled():
            return "optimizer", ""
        return ("forward" if learns and torch.is_grad_enabled() else "other"), ""

    def accumulates(self) -> Tensor | None:
        """The parameter into whose `.grad` a gradient is just being put."""
        node = current_node()
        return node.variable if node is not None and type(node).__name__ == "AccumulateGrad" else None

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
            if not (module.training or torch.is_grad_enabled()):
                self.evaluated(module)
        self._stack.append(self._current[-1].get(id(module)) or type(module).__name__)

    def _leaves(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()
        if not self._stack:
            self._current.clear()

    def _step_begins(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.optimizing = True

    def _step_ends(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.optimizing = False
