"""CUDA graphs for batches of other shapes than the usual: texts padded to the longest, the last of an epoch."""

from collections import Counter
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop._torch import copy_all
from hotloop.memory.oom import began_with, is_out_of_memory
from hotloop.placement import tensors_in
from hotloop.plan import Plan
from hotloop.step.captured_graph import CannotCapture, CapturedGraph, Rates, seen_batch, static_batch
from hotloop.step.eager import Parts

FROM = 10  # times that a shape was seen when it is captured
MOST_SHAPES = 48  # shapes


class Capturing(Protocol):
    """The captured step, as `OtherShapes` uses it."""

    plan: Plan
    device: torch.device
    optimizers: list[Optimizer]

    @property
    def is_ready(self) -> bool: ...

    def capturing(self, *, afresh: bool, pool: Any = None) -> AbstractContextManager[CapturedGraph]: ...

    def call(self, batch: Any) -> tuple[Parts, int | Tensor]: ...

    def replay(self, graph: CapturedGraph, steps: int = 1) -> None: ...

    def taken(self, graph: CapturedGraph, *, updated: bool) -> Parts: ...


@dataclass(frozen=True)
class _Shape:
    graph: CapturedGraph
    buffers: list[Tensor]  # of the batch that it reads


class OtherShapes:
    """A graph for each shape that recurs, up to a number; all share one pool of memory.

    Only the losses of a graph are needed after its replay, so that the next may overwrite the rest. For that reason
    gradients are not left on the parameters, and a window of several batches is not captured here.
    """

    def __init__(self, step: Capturing) -> None:
        self._step = step
        self.drop()

    def drop(self) -> None:
        """Drop all graphs: the step has changed."""
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Shape] = {}
        self._pool: Any = None
        self._rates: Rates | None = None
        self._is_closed = False  # there is no memory for more of them, or a capture has failed

    def __call__(self, batch: Any, form: Hashable) -> Parts | None:
        """Train on a batch by the graph of its shape; None where it should run eagerly."""
        shape = self._graphs.get(form)
        if shape is None:
            self._seen[form] += 1
            if self._seen[form] < FROM or self._is_closed or not self._is_possible():
                return None
            shape = self._captured(batch, form)
            if shape is None:
                return None
        assert self._rates is not None
        if self._rates.changed():
            return None  # it is found and said when a batch of the usual shape comes
        copy_all(shape.buffers, [tensor for _, tensor in tensors_in(batch)])
        self._rates.send([self._rates.now()])
        self._step.replay(shape.graph)
        return self._step.taken(shape.graph, updated=True)

    def _is_possible(self) -> bool:
        step = self._step
        return step.is_ready and step.plan.accumulate == 1 and len(self._graphs) < MOST_SHAPES

    def _captured(self, batch: Any, form: Hashable) -> _Shape | None:
        step = self._step
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._rates = Rates(step.optimizers, 1, step.device)
        assert self._rates is not None
        static, buffers = static_batch(batch)
        try:
            with self._rates.of_step(0), step.capturing(afresh=True, pool=self._pool) as graph:
                graph.result = step.call(seen_batch(static))
        except Exception as error:
            if not isinstance(error, CannotCapture) and not is_out_of_memory(began_with(error)):
                raise
            self.drop()
            self._is_closed = True
            return None
        graph.gradients = [(parameter, None) for parameter, _ in graph.gradients]
        self._graphs[form] = shape = _Shape(graph, buffers)
        return shape
