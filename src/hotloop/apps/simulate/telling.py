"""Who is told what happens on the simulated device, when its memory comes and goes, and in which phase and module."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hotloop.apps.simulate._torch import current_node, next_sequence_number, sequence_number, storage_id
from hotloop.apps.simulate.events import Listener, Operation
from hotloop.placement.sites import Site


class Teller:
    """Hands every event to all listeners, one event at a time.

    Memory may be freed while they hear of another event: the garbage collector runs at any moment. They hear of it
    after that one.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._all = listeners
        self._depth = 0  # events that listeners are being told
        self._freed: deque[int] = deque()  # memory of which they have not heard yet

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            while self._depth == 1 and self._freed:
                key = self._freed.popleft()
                for listener in self._all:
                    listener.freed(key)
        finally:
            self._depth -= 1

    def allocated(self, key: int, size: int, kind: str) -> None:
        with self:
            for listener in self._all:
                listener.allocated(key, size, kind)

    def freed(self, key: int) -> None:
        self._freed.append(key)
        if self._depth:
            return
        with self:
            pass

    def named(self, key: int, kind: str) -> None:
        with self:
            for listener in self._all:
                listener.named(key, kind)

    def before(self, operation: Operation) -> None:
        with self:
            for listener in self._all:
                listener.before(operation)

    def after(self, operation: Operation) -> None:
        with self:
            for listener in self._all:
                listener.after(operation)

    def copied(self, size: int, direction: str, *, pinned: bool, blocking: bool, place: Site | None) -> None:
        with self:
            for listener in self._all:
                listener.copied(size, direction, pinned=pinned, blocking=blocking, place=place)

    def waited(self, kind: str, place: Site | None) -> None:
        with self:
            for listener in self._all:
                listener.waited(kind, place)

    def loaded(self, seconds: float, workers: int) -> None:
        with self:
            for listener in self._all:
                listener.loaded(seconds, workers)

    def step(self) -> None:
        with self:
            for listener in self._all:
                listener.step()


class Storages:
    """Tells listeners of every memory that comes and goes, by weak references on PyTorch's own storages."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._alive: dict[int, tuple[weakref.ref[Any], int, str]] = {}  # by address: itself, its key, what it is
        self._next = 0

    def born(self, tensor: Tensor, kind: str) -> None:
        """Notice the memory of a new tensor; a view has none of its own."""
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        held = self._alive.get(address)
        if held is not None and held[0]() is storage:
            return
        self._next += 1
        key = self._next
        self._teller.allocated(key, storage.nbytes(), kind)  # may find that there is no room
        self._alive[address] = (weakref.ref(storage, lambda _: self._gone(address, key)), key, kind)

    def resized(self, tensor: Tensor, kind: str) -> None:
        """A storage has another size now: as the allocator sees it, an old block went and a new one came."""
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        held = self._alive.pop(address, None)
        if held is not None:
            self._teller.freed(held[1])
        self.born(tensor, kind)

    def name(self, tensor: Tensor, kind: str) -> None:
        """A memory turned out to be something else."""
        held = self._alive.get(storage_id(tensor))
        if held is not None and held[2] != kind:
            self._alive[storage_id(tensor)] = (held[0], held[1], kind)
            self._teller.named(held[1], kind)

    def kind(self, tensor: Tensor) -> str:
        """What a memory is; nothing where it is not known."""
        held = self._alive.get(storage_id(tensor))
        return held[2] if held is not None else ""

    def _gone(self, address: int, key: int) -> None:
        held = self._alive.get(address)
        if held is None or held[1] != key:
            return
        del self._alive[address]
        self._teller.freed(key)


class Circumstances:
    """In which phase of training and in which module an operation runs."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names = WeakIdKeyDictionary()  # outermost module → path by the identity of each module in it
        self._current: list[dict[int, str]] = []
        self._of_node: dict[int, str] = {}  # autograd's sequence number → module of its forward
        self.optimizing = False  # whether an optimizer makes a step
        self.evaluated: Callable[[nn.Module], None] = lambda module: None  # told of calls in eval mode, no gradients
        self._hooks: list[Any] = []

    def __enter__(self) -> "Circumstances":
        modules = nn.modules.module
        self._hooks = [
            modules.register_module_forward_pre_hook(self._enters),
            modules.register_module_forward_hook(self._leaves, always_call=True),
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
