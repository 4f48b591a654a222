"""Which phase of training runs, and in which module, found by hooks that leave the model itself alone."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotloop._torch import backward_pass, next_node_number, node_number, running_node

PHASES = ("between", "forward", "backward", "optimizer")
OUTSIDE = ""  # in place of a module's name: the operation stood in none


@dataclass
class Visit:
    """A module whose forward runs; those who watch may keep figures of it."""

    name: str
    kind: str
    key: int
    before: int
    highest: int


class _Here(threading.local):
    """The modules that run in this thread, outermost first: a backward pass has threads of its own."""

    def __init__(self) -> None:
        self.stack: list[Visit] = []


@dataclass
class Phases:
    """Where training stands. Names in brackets are classes: of the model itself, and of modules outside of it."""

    model: nn.Module
    live: Callable[[], int]  # bytes, for the figures of visits
    done: Callable[[Visit], None]
    _names: dict[int, str] = field(init=False)
    _here: _Here = field(default_factory=_Here)
    _main: int = field(default_factory=threading.get_ident)
    _updates: list[tuple[int, int | None, int]] = field(default_factory=list)  # optimizer, backward pass, depth
    _tail: bool = False  # after a forward that learns, before its backward: there the loss is computed
    _starts: list[int] = field(default_factory=lambda: [0])  # from this number of an autograd node on …
    _makers: list[str] = field(default_factory=lambda: [OUTSIDE])  # … nodes were made by this module

    def __post_init__(self) -> None:
        self._names = {id(module): name for name, module in self.model.named_modules() if name}

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice modules and optimizers inside the block, by PyTorch's global hooks."""
        with ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter).remove)
            undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            undo.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
            undo.callback(register_optimizer_step_post_hook(self._end_update).remove)
            yield

    @property
    def visits(self) -> list[Visit]:
        """The modules whose forward runs in this thread, outermost first."""
        return self._here.stack

    def phase(self) -> str:
        """The phase that runs; the innermost where one is inside another."""
        backward, depth = backward_pass(), len(self.visits)
        if self._updates:  # an update inside a backward pass, or an optimizer that calls for forward and backward
            _, outer, outer_depth = self._updates[-1]
            return "backward" if backward not in (None, outer) else "forward" if depth > outer_depth else "optimizer"
        if backward is not None:
            self._tail = False
            return "backward"
        return "forward" if depth or self._tail else "between"

    def module(self) -> str:
        """The module that runs; in a backward pass the one whose forward it undoes."""
        if self.visits:  # in a backward pass too: checkpointing runs a forward there
            return self.visits[-1].name
        node = running_node()
        if node is None:
            return OUTSIDE
        number = node_number(node)
        if number is None:  # it adds to a gradient
            return self._owner(getattr(node, "variable", None))
        return self._makers[bisect_right(self._starts, number) - 1]

    def _owner(self, parameter: Any) -> str:
        paths = (path for path, p in self.model.named_parameters() if p is parameter)
        return next(paths, OUTSIDE).rpartition(".")[0]

    def _enter(self, module: nn.Module, args: Any) -> None:
        kind = type(module).__name__
        live = self.live()
        self.visits.append(Visit(self._names.get(id(module), f"({kind})"), kind, id(module), live, live))
        self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not any(visit.key == id(module) for visit in self.visits):
            return
        while self.visits:  # more than one where an interruption skipped a hook
            visit = self.visits.pop()
            self.done(visit)
            if visit.key == id(module):
                break
        self._mark()
        if not self.visits:
            self._tail = torch.is_grad_enabled()

    def _mark(self) -> None:
        """From here on, autograd nodes belong to the module that runs now; other threads number theirs apart."""
        if threading.get_ident() == self._main:
            self._starts.append(next_node_number())
            self._makers.append(self.visits[-1].name if self.visits else OUTSIDE)

    def _begin_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._updates = [update for update in self._updates if update[0] != id(optimizer)]  # one that failed
        self._updates.append((id(optimizer), backward_pass(), len(self.visits)))

    def _end_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._updates = [update for update in self._updates if update[0] != id(optimizer)]
        self._tail = False
