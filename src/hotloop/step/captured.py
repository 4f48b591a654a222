"""`CapturedStep`: trains by CUDA graphs of the step, one for each phase of a window and each shape that comes again."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.random import fork_rng

from hotloop._torch import copy_all
from hotloop.device.backend import backend_of
from hotloop.memory.oom import Failure, began_with, is_out_of_memory
from hotloop.step.capture_warm_up import CaptureWarmUp
from hotloop.step.captured_graph import (
    CannotCapture,
    CapturedGraph,
    Gradients,
    Rates,
    StaticBatch,
    capture_stream,
)
from hotloop.step.draws import repeat
from hotloop.step.eager import Parts
from hotloop.step.eager_calls import EagerCalls, watching
from hotloop.step.frozen import Departed, Frozen
from hotloop.step.inspection import Inspection, operations_of, signature
from hotloop.values.tree import tensors_in

SHAPE_FROM, MOST_SHAPES = 10, 48  # times that another shape was seen when it is captured, and how many of them are
CAN_CHANGE = "changes while it runs, which a capture would freeze"

T = TypeVar("T")


class Dependent(Protocol):
    """A holder of other graphs of the same step."""

    def drop(self) -> None: ...


class CapturedStep:
    """Captures and replays a step; batches of other shapes run eagerly until `OtherShapes` has a graph for them.

    A step is captured after a few real ones, which are its warm-up, so that nothing has to be restored. It is not
    captured where a capture would change its results: then `abandon` gets the reason, and the step stays eager.
    """

    def __init__(self, calls: EagerCalls, abandon: Callable[[str], None]) -> None:
        self.calls, self.abandon = calls, abandon
        self.frozen = Frozen(calls, forget=self.forget, abandon=abandon)
        self.dependents: WeakSet[Dependent] = WeakSet()  # other graphs of this step, which go when it forgets
        self.generation = 0  # of captures
        self._side = capture_stream(calls.device)
        self._form: Any = None  # of the batches that are captured
        self._others = OtherShapes(self)
        self.dependents.add(self._others)
        self.forget()

    def forget(self) -> None:
        """Drop the graphs: the model's tensors are no longer those that they were captured with."""
        self.generation += 1
        self.frozen.clear()
        self._warm_up = CaptureWarmUp(self.calls, self._side, self.frozen, self.abandon)
        self._graphs: dict[tuple[bool, bool], CapturedGraph] = {}  # by phase: first of its window, last of it
        self._static: StaticBatch | None = None  # that they read
        self._rates: Rates | None = None  # that all graphs of one step read
        self._gradients: Gradients = []  # that they write
        self._shown: Gradients | None = None  # that the parameters have
        self._window_is_captured = False  # whether all batches of the window so far were replayed
        for dependent in self.dependents:
            dependent.drop()

    @property
    def has_captures(self) -> bool:
        return self.frozen.has_captures

    @property
    def is_ready(self) -> bool:
        """Whether the next step may be captured."""
        return self._warm_up.is_ready

    def __call__(self, batch: Any) -> Parts:
        """Train on one batch by a graph, captured first where there is none; eagerly where that is impossible."""
        form = signature(batch)
        if (parts := self._without_graph(batch, form)) is not None:
            return parts
        phase = self.calls.eagers[0].phase
        graph = self._graphs.get(phase)
        if graph is None:
            capture = partial(self.capture_one, batch, self._static, form, afresh=phase[0])
            try:
                graph = self.attempt(capture, self.calls.items_in(batch), self.abandon)
            except Departed:
                return self._warm_up(batch)
            if graph is None:
                return self._run_eagerly(batch)
            self._graphs[phase], self._static = graph, graph.static
            if phase[0]:
                self._gradients = graph.gradients
        if name := graph.rates.changed():
            self.abandon(f"the optimizer's {name} {CAN_CHANGE}")
            return self._run_eagerly(batch)
        self._window_is_captured = True
        return self.replay_one(graph, batch, updates=phase[1])

    def _without_graph(self, batch: Any, form: Any) -> Parts | None:
        """Train on a batch that no graph of the usual shape fits; None where one does, or is to be captured."""
        if form is None:
            return self._run_eagerly(batch)
        if self._form is None or not (self._warm_up.is_ready or self.calls.plan.accumulate > 1):
            self._form = form  # whichever comes last before it is captured
        if form != self._form:
            parts = self._others(batch, form)
            return self._run_eagerly(batch) if parts is None else parts
        self.check_size()
        if self.frozen.comparison_is_due:
            self.compare(batch)
        if not self._warm_up.is_ready:
            return self._warm_up(batch)
        if not self.calls.eagers[0].phase[0] and not self._window_is_captured:
            return self._run_eagerly(batch)
        return None

    def _run_eagerly(self, batch: Any) -> Parts:
        """Train on a batch eagerly, perhaps within a window that graphs have begun."""
        if not self.calls.eagers[0].phase[0] and self._window_is_captured:
            self._show(self._gradients)
        self._window_is_captured, self._shown = False, None
        return self.calls.run(batch)

    def check_size(self) -> None:
        """Drop the graphs where the size of micro-batches has changed."""
        if not self._warm_up.is_sized:
            self.forget()

    def check_step(self) -> None:
        """Check what captures froze before a step of a loop by hand."""
        self._shown = None  # somebody may have cleared the gradients
        self.frozen.check_step()

    def compare(
        self, batch: Any, transform: Callable[[Any], Any] | None = None, seen: Sequence[Inspection] = ()
    ) -> None:
        """Compare an eager forward pass with the captured one, and drop the captures where they differ."""
        self.frozen.compare(batch, self._warm_up.looks, self._side, transform, seen)

    # Captures

    def attempt(self, capture: Callable[[], T], items: int | None, refuse: Callable[[str], None]) -> T | None:
        """Capture; None where that fails: then micro-batches are smaller, or `refuse` gets the reason.

        `items`: of a batch; None where batches are not to become smaller for it.
        """
        memory, failure = self.calls.memory, None
        try:
            return capture()
        except Departed:
            raise
        except Exception as error:
            first = began_with(error)
            ran_out = is_out_of_memory(first) and (memory is not None or items is None)
            if not ran_out and not isinstance(error, CannotCapture):
                raise
            if ran_out and items is not None:
                failure = Failure.of(first, self.calls.device)
            why = str(error)
        # Outside of `except`: the error holds the frames of the capture, and they hold its tensors.
        if memory is None or failure is None or items is None or (size := memory.portion.of(items)) <= 1:
            refuse(why)
        else:
            self.forget()
            memory.shrink(size, failure)
        return None

    def capture_one(
        self, batch: Any, static: StaticBatch | None, form: Hashable, *, afresh: bool = True, pool: Any = None
    ) -> CapturedGraph:
        """The graph of one step on batches like this, which are copied into a static one: this, or else a new one."""
        if static is None:
            static = StaticBatch.of(batch)
        if self._rates is None:
            self._rates = Rates(self.calls.optimizers, 1, self.calls.device)
        size, graph = self.calls.size_of(batch), CapturedGraph(self._rates, static)
        with self._rates.of_step(0), self.capturing(graph, afresh=afresh, pool=pool):
            graph.begin_step(form)
            given = static.fresh()
            for call in self.calls.calls:
                call(given, size)
        return graph

    @contextmanager
    def capturing(self, graph: CapturedGraph, *, afresh: bool, pool: Any = None) -> Iterator[None]:
        """Capture the calls of eager steps inside the block; nothing is counted, since nothing runs.

        `afresh`: start with new gradients, else accumulate into the present ones. `pool`: memory shared with other
        graphs.
        """
        calls, looks, captured = self.calls, self._warm_up.looks, Inspection()
        if not afresh:
            self._show(self._gradients)
        self._shown = None  # a capture that fails leaves gradients which nothing has computed
        compares = bool(looks.made) and not calls.is_compiled
        if any(state.numel() for each in looks.latest for state in each.held):
            _prepare_dropout(calls.device)
        with ExitStack() as around:
            for eager in calls.eagers:
                around.enter_context(eager.capturing(graph.note_losses))
            if compares:
                around.enter_context(watching(calls.eagers, partial(operations_of, captured)))
            # What the host draws in a pass that does not run is drawn by its replay.
            with fork_rng(devices=[], enabled=bool(looks.draws)), graph.capturing(self._side.stream, pool):
                yield
            norms = [eager.update.norm for eager in calls.eagers]
        states = [value for o in calls.optimizers for state in o.state.values() for _, value in tensors_in(state)]
        parameters = [p for eager in calls.eagers for p in eager.trained.parameters]
        graph.keep(
            [(p, p.grad) for p in parameters] if afresh else self._gradients,
            [norm for norm in norms if norm is not None],  # of all objectives, or of none
            [*captured.held, *calls.modules_and_tensors()[1], *states],
        )
        captured.form = graph.form if compares else None
        self.frozen.note_capture(captured, looks)
        self._shown = graph.gradients

    # Replays

    def replay_one(self, graph: CapturedGraph, batch: Any, *, updates: bool) -> Parts:
        """Train on a batch by its graph; the host counts it and advances schedules. Returns the losses."""
        calls = self.calls
        copy_all(graph.static.buffers, [tensor for _, tensor in tensors_in(batch)])
        graph.rates.send([graph.rates.now()])
        self.replay(graph)
        parts = {name: value.clone() for name, value in graph.losses.items()}  # the next replay writes over these
        if calls.see is not None:
            count = graph.count
            calls.see(parts, count.clone() if isinstance(count, Tensor) else count)
        self.count(graph)
        if updates:
            calls.advance_schedules()
        return parts

    def replay(self, graph: CapturedGraph, steps: int = 1) -> None:
        """Replay a graph of `steps` steps."""
        self.frozen.replays += steps
        graph.replay()
        repeat(self._warm_up.looks.draws, steps)
        self._show(graph.gradients)

    def count(self, graph: CapturedGraph, steps: int = 1) -> None:
        """Count steps that a graph has made."""
        if self.calls.memory is not None:
            self.calls.memory.portion.went_well(steps)
        for eager, norm in zip_longest(self.calls.eagers, graph.norms):
            eager.replayed(steps, norm)

    def _show(self, gradients: Gradients) -> None:
        """Set `.grad` of the parameters to the gradients that a graph writes."""
        if self._shown is not gradients:
            self._shown = gradients
            for parameter, gradient in gradients:
                parameter.grad = gradient


class OtherShapes:
    """Graphs for batches of other shapes than the usual: texts padded to the longest, the last of an epoch.

    One for each shape that recurs, up to a number; all share one pool of memory.

    Only the losses of a graph are needed after its replay, so that the next may overwrite the rest. For that reason
    gradients are not left on the parameters, and a window of several batches is not captured here.
    """

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self.drop()

    def drop(self) -> None:
        """Drop all graphs: the step has changed."""
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, CapturedGraph] = {}
        self._pool: Any = None
        self._is_closed = False  # there is no memory for more of them, or a capture has failed

    def __call__(self, batch: Any, form: Hashable) -> Parts | None:
        """Train on a batch by the graph of its shape; None where it should run eagerly."""
        graph = self._graphs.get(form)
        if graph is None:
            self._seen[form] += 1
            if self._seen[form] < SHAPE_FROM or self._is_closed or not self._is_possible():
                return None
            graph = self._captured(batch, form)
            if graph is None:
                return None
        if graph.rates.changed():
            return None  # it is found and said when a batch of the usual shape comes
        return self._step.replay_one(graph, batch, updates=True)

    def _is_possible(self) -> bool:
        step = self._step
        return step.is_ready and step.calls.plan.accumulate == 1 and len(self._graphs) < MOST_SHAPES

    def _captured(self, batch: Any, form: Hashable) -> CapturedGraph | None:
        step = self._step
        if self._pool is None:
            self._pool = backend_of(step.calls.device).graph_pool()
        capture = partial(step.capture_one, batch, None, form, pool=self._pool)
        try:
            graph = step.attempt(capture, None, self._close)
        except Departed:
            self._close()
            return None
        if graph is not None:
            graph.hide_gradients()
            self._graphs[form] = graph
        return graph

    def _close(self, why: str = "") -> None:
        """Capture no more of them."""
        self.drop()
        self._is_closed = True


def _prepare_dropout(device: torch.device) -> None:
    """Let PyTorch make cuDNN's dropout state of recurrent layers now, which it cannot during a capture."""
    layer = nn.LSTM(1, 1, num_layers=2, dropout=0.5, device="meta").to_empty(device=device)  # without a draw
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        layer(torch.zeros(1, 1, 1, device=device))
