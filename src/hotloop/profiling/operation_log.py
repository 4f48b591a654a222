"""`OperationLog`: one step operation by operation, with the person's line, the shapes, and the memory it leaves."""

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch.optim import Optimizer

from hotloop._torch import (
    DispatchMode,
    LoaderIterator,
    backward_pass,
    next_node_number,
    node_number,
    running_node,
    schema_of,
)
from hotloop.device.backend import backend_of
from hotloop.placement.sites import Site, is_hotloops, is_users, site_of, user_site
from hotloop.profiling.flops import flops_of, precision_of
from hotloop.profiling.residents import Residents
from hotloop.scripts.training_steps import around, before_each
from hotloop.values.tree import tensors_of


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """One operation as it was asked for."""

    name: str
    phase: str  # forward, backward, update; data inside a DataLoader
    site: Site | None
    shapes: str
    flops: float
    precision: str
    by_hotloop: bool = False  # which reads values where that costs nothing; the line is the person's all the same


class OperationLog(DispatchMode):
    """Notes every operation of a step. It is slow, so the steps that are timed are others.

    A backward operation is noted with the line of its forward: autograd numbers its nodes in the order in which the
    forward made them, so the number of the node that runs tells which operation made it.
    """

    def __init__(self, device: torch.device, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        super().__init__()
        self.seen: list[LoggedOperation] = []
        self.memory = Residents(device, optimizers)
        self._backend = backend_of(device)
        self._main = threading.get_ident()
        self._numbers: list[int] = []  # of the next node of autograd, after …
        self._sites: list[Site | None] = []  # … an operation of this line
        self._loading = self._updating = 0

    @contextmanager
    def looking(self) -> Iterator["OperationLog"]:
        """Look at what runs inside the block, in this thread and in the backward passes that it asks for."""
        with ExitStack() as undo:
            undo.enter_context(around(LoaderIterator, "__next__", self._load))
            for owner, call in self._backend.synchronizing():
                undo.enter_context(before_each(owner, "synchronize", partial(self._ask, call)))
            undo.callback(self.memory.close)
            with self:
                yield self

    def begin_update(self, *_: object) -> None:
        """An optimizer's step begins. Its hooks cannot say so by themselves: a look may begin inside of one."""
        self._updating += 1

    def end_update(self, *_: object) -> None:
        self._updating = max(self._updating - 1, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        schema = schema_of(func)
        if schema is None or getattr(func, "namespace", "") == "profiler":
            return result
        phase = self._phase()
        self.seen.append(
            LoggedOperation(
                schema.name,
                phase,
                self._site(phase),
                _shapes(args),
                flops_of(func, args, given, result),
                precision_of(args),
                is_hotloops(sys._getframe(1)),
            )
        )
        self.memory.note((args, given, result), phase)
        return result

    def _phase(self) -> str:
        if self._loading:
            return "data"
        if self._updating:
            return "update"
        return "forward" if backward_pass() is None else "backward"

    def _site(self, phase: str) -> Site | None:
        if phase == "backward" and not torch.is_grad_enabled():  # else it computes a part of the forward once more
            return self._made_by(running_node())
        site = user_site()
        if threading.get_ident() == self._main:
            self._numbers.append(next_node_number())
            self._sites.append(site)
        return site

    def _made_by(self, node: Any) -> Site | None:
        """The line that made a node of autograd; of a gradient that is put into place, that of the backward pass."""
        number = node_number(node)
        at = len(self._sites) if number is None else bisect_right(self._numbers, number)
        return self._sites[at] if at < len(self._sites) else self._main_site()

    def _main_site(self) -> Site | None:
        """Where the main thread stands: a backward pass on a GPU has a thread of its own, and the main one waits."""
        frame = sys._current_frames().get(self._main)
        while frame is not None and not is_users(frame):
            frame = frame.f_back
        return None if frame is None else site_of(frame)

    def _load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def loading(*args: Any) -> Any:
            self._loading += 1
            try:
                return original(*args)
            finally:
                self._loading -= 1

        return loading

    def _ask(self, call: str, *_: Any, **__: Any) -> None:
        """Note a wait that the person asks for: it is no operation."""
        if threading.get_ident() == self._main:
            self.seen.append(LoggedOperation(call, self._phase(), user_site(), "", 0.0, "fp32"))


def _shapes(args: Any) -> str:
    """The shapes of the tensors in a call, as people write them; of a long list, the first few."""
    tensors = tensors_of(args)
    said = ["×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors[:3]]
    return ", ".join(said) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
