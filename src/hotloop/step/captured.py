"""`CapturedStep`: steps as CUDA graphs, and the checks that a replay still is the step."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.random import fork_rng

from hotloop._torch import buffers_of, copy_all, gradient_hooks, module_hooks, parameters_of, step_hooks
from hotloop.device.backend import backend_of
from hotloop.errors import PlanWarning
from hotloop.levers.applied import AppliedPlan
from hotloop.levers.tf32 import fp32_matmul_precision
from hotloop.memory.oom import Failure, began_with, is_out_of_memory
from hotloop.objective.objectives import Objective
from hotloop.placement.waits import waits
from hotloop.step.captured_graph import (
    WARM_UP,
    CannotCapture,
    CapturedGraph,
    Rates,
    capture_stream,
    renew_accumulation,
    seen_batch,
    static_batch,
)
from hotloop.step.constants import made_on_device
from hotloop.step.draws import Draw, repeat
from hotloop.step.eager import EagerStep, Parts, See
from hotloop.step.inspection import Comparison, Inspection, Looks, departure, inspected, operations_of, signature
from hotloop.step.retry import OutOfMemory
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.values.reach import ReachableState, kept_by_capture, look
from hotloop.values.snapshot import PassSnapshot
from hotloop.values.tree import tensors_in

COMPARE_EVERY = 500  # replays after which an eager forward pass is compared with what was captured
LASTING, BRIEF = 100, 3  # steps that captures are to last in a loop by hand, and how often they may not
SHAPE_FROM, MOST_SHAPES = 10, 48  # times that another shape was seen when it is captured, and how many of them are
STALE = 2  # times that it differed, after which nothing is captured any more
CAN_CHANGE = "changes while it runs, which a capture would freeze"

Call = Callable[[Any, int | None], Parts]  # an eager step: (batch, size of micro-batches)
Gradients = Sequence[tuple[nn.Parameter, Tensor | None]]


class Dependent(Protocol):
    """A holder of other graphs of the same step."""

    def drop(self) -> None: ...


class CapturedStep:
    """Captures and replays a step; batches of other shapes run eagerly until `OtherShapes` has a graph for them.

    A step is captured after a few real ones, which are its warm-up, so that nothing has to be restored. It is not
    captured where a capture would change its results: then `abandon` gets the reason, and the step stays eager.

    `calls` are the eager steps with the levers of the plan, `run` is all of them with OOM retry.
    """

    def __init__(
        self,
        model: nn.Module,
        eagers: Sequence[EagerStep],
        calls: Sequence[Call],
        run: Callable[[Any], Parts],
        levers: AppliedPlan,
        *,
        memory: OutOfMemory | None,
        see: See | None,
        after_update: Callable[[TrainedObjective], None] | None,
        abandon: Callable[[str], None],
    ) -> None:
        self.model, self.eagers, self.levers, self.memory = model, eagers, levers, memory
        self.plan = levers.plan
        self.device = torch.device(self.plan.device)
        self.transform: Callable[[Any], Any] | None = None  # of batches, where it is captured together with steps
        self.optimizers = [optimizer for eager in eagers for optimizer in eager.trained.optimizers]
        self.dependents: WeakSet[Dependent] = WeakSet()  # other graphs of this step, which go when it forgets
        self._calls, self._run, self._see, self._after_update, self.abandon = calls, run, see, after_update, abandon
        self._is_compiled = self.plan.compile != "off"
        self._side = capture_stream(self.device)
        self._form: Any = None  # of the batches that are captured
        self._compared_at = 0  # the step up to which captures are known to be what Python asks for
        self._stale = 0  # times that they were not
        self._captured_at = 0  # the step at which the first of the present captures was made
        self._brief = 0  # times that captures did not last
        self._departed = False  # whether the captured operations are others than the eager ones
        self._called: Any = None  # the form of the batch that was captured last
        self.generation = 0  # of captures
        self._hooked: list[Callable[..., Any]] | None = None  # hooks that were there before the first of them
        self._others = OtherShapes(self)
        self.dependents.add(self._others)
        self.forget()

    def forget(self) -> None:
        """Drop the graphs: the model's tensors are no longer those that they were captured with."""
        self.generation += 1
        self.replays = 0  # since the last forward pass that was compared with the captured one
        self.has_captures = False
        self.is_ready = False  # whether the step has run a few times and was seen to do the same work
        self._has_room = True  # for an eager forward pass beside the captures
        self._frozen = ReachableState()  # numbers that Python had when the step was captured
        self._limit = None if self.memory is None else self.memory.portion.limit
        self._stood: Stance | None = None
        self._warmed = 0
        self._looks = Looks()
        self._has_waited = False  # in a rehearsal
        self._first_capture: Inspection | None = None  # where it does other work than eagerly
        self._graphs: dict[tuple[bool, bool], CapturedGraph] = {}  # by phase: first of its window, last of it
        self._static: Any = None  # the batch that they read
        self._gradients: Gradients = []  # that they write
        self._shown: Gradients | None = None  # that the parameters have
        self._window_is_captured = False  # whether all batches of the window so far were replayed
        for dependent in self.dependents:
            dependent.drop()

    def __call__(self, batch: Any) -> Parts:
        """Train on one batch by a graph, captured first where there is none; eagerly where that is impossible."""
        form = signature(batch)
        if (parts := self._without_graph(batch, form)) is not None:
            return parts
        phase = self.eagers[0].phase
        graph, failure, why = self._graphs.get(phase), None, None
        if graph is None:
            if self._static is None:
                self._static, self._buffers = static_batch(batch)
                self._rates = Rates(self.optimizers, 1, self.device)
            try:
                with self._rates.of_step(0), self.capturing(afresh=phase[0]) as graph:
                    self._called = form
                    for call in self._calls:
                        call(seen_batch(self._static), self._size_of(batch))
                    graph.result = self._seen_parts, self._seen_count
                if phase[0]:
                    self._gradients = graph.gradients
                self._graphs[phase] = graph
            except Exception as error:
                if isinstance(error, Departed):
                    return self._warm_up(batch)
                failure, why = self.want_of_memory(error), str(error)
                if failure is None and not isinstance(error, CannotCapture):
                    raise
                graph = None
        if graph is None:
            if not self.shrink(failure, self.eagers[0].weighing.items_in(batch)):
                self.abandon(why or "")
            return self.run_eagerly(batch)
        if name := self._rates.changed():
            self.abandon(f"the optimizer's {name} {CAN_CHANGE}")
            return self.run_eagerly(batch)
        copy_all(self._buffers, [tensor for _, tensor in tensors_in(batch)])
        self._rates.send([self._rates.now()])
        self.replay(graph)
        self._window_is_captured = True
        return self.taken(graph, updated=phase[1])

    def _without_graph(self, batch: Any, form: Any) -> Parts | None:
        """Train on a batch that no graph of the usual shape fits; None where one does, or is to be captured."""
        if form is None:
            return self.run_eagerly(batch)
        if self._form is None or not (self.is_ready or self.plan.accumulate > 1):
            self._form = form  # whichever comes last before it is captured
        if form != self._form:
            parts = self._others(batch, form)
            return self.run_eagerly(batch) if parts is None else parts
        self.check_size()
        if self.comparison_is_due:
            self.compare(batch)
        if not self.is_ready:
            return self._warm_up(batch)
        if not self.eagers[0].phase[0] and not self._window_is_captured:
            return self.run_eagerly(batch)
        return None

    def taken(self, graph: CapturedGraph, *, updated: bool) -> Parts:
        """The losses of a batch that was replayed; the host counts it and advances schedules."""
        static, count = graph.result
        parts = {name: value.clone() for name, value in static.items()}  # the next replay writes over these
        if self._see is not None:
            self._see(parts, count.clone() if isinstance(count, Tensor) else count)
        if self.memory is not None and self.memory.portion.failures:
            self.memory.portion.went_well()
        for eager in self.eagers:
            eager.replayed()
        if updated:
            self._schedule()
        return parts

    # Eager steps

    def run_eagerly(self, batch: Any) -> Parts:
        """Train on a batch eagerly, perhaps within a window that graphs have begun."""
        if not self.eagers[0].phase[0] and self._window_is_captured:
            self._show(self._gradients)
        self._window_is_captured, self._shown = False, None
        return self._run(batch)

    def _warm_up(self, batch: Any) -> Parts:
        """A real step on the capture stream; two of them or more are inspected."""
        if not self._warmed:
            renew_accumulation(p for eager in self.eagers for p in eager.trained.parameters)
            if not self._is_compiled and self.memory is not None and self.memory.snapshot.has_seen_passes:
                self._warmed = 1  # by steps of another plan, or of before they were captured anew
        self._warmed += 1
        self.is_ready = self._warmed > WARM_UP
        with self._side.running():
            if self._warmed in (WARM_UP - 1, WARM_UP):
                parts = self._inspected(batch)
            else:  # with rates on the device only where the person's code was seen to leave them alone
                parts = self._rehearsed(batch) if self.is_ready else self._run(batch)
        if self._is_sized and self._warmed == WARM_UP:
            if not self._looks.are_enough:
                self._warmed -= 1  # the next step is inspected, too
            elif why := self._looks.objection():
                self.abandon(why)
        return parts

    def _rehearsed(self, batch: Any) -> Parts:
        """Run the step as it will be captured, with learning rates on the device, and check that it does not block."""
        rates, updates = Rates(self.optimizers, 1, self.device), self.eagers[0].phase[1]
        for eager in self.eagers:
            eager.after_update = None  # a schedule must not write to what is restored below
        inside = nullcontext() if self._is_compiled else watching(self.eagers, made_on_device)
        try:
            with waits(self.device) as seen, rates.of_step(0), inside:
                parts = self._run(batch)
        finally:
            for eager in self.eagers:
                eager.after_update = self._after_update
        if updates:
            self._schedule()
        if self._is_sized and len(seen) > seen.in_packages:
            if self._has_waited:
                self.abandon(f"the host waits for the device: {seen}")
            self._has_waited, self.is_ready, self._warmed = True, False, WARM_UP  # once is no reason
        return parts

    def _inspected(self, batch: Any) -> Parts:
        seen = Inspection(form=signature(batch))
        self._looks.made.append(seen)
        if self._hooked is None:
            self._hooked = self._stance().hooks
        before = look(self._roots(), kept_by_capture, hold=True)
        with watching(self.eagers, partial(inspected, self.device, seen)):
            parts = self._run(batch)
        seen.compare(before, look(self._roots(), kept_by_capture, hold=True))
        return parts

    # Captures

    @contextmanager
    def capturing(self, *, afresh: bool, pool: Any = None) -> Iterator[CapturedGraph]:
        """Capture the calls of eager steps inside the block; nothing is counted, since nothing runs.

        `afresh`: start with new gradients, else accumulate into the present ones. `pool`: memory shared with other
        graphs.
        """
        graph, seen = CapturedGraph(), Inspection()
        self._seen_parts: Parts = {}  # losses of the batch that is captured
        self._seen_count: int | Tensor = 0

        def collect(parts: Parts, count: int | Tensor) -> None:
            self._seen_parts |= parts
            self._seen_count = count

        if not afresh:
            self._show(self._gradients)
        self._shown = None  # a capture that fails leaves gradients which nothing has computed
        compares = bool(self._looks.made) and not self._is_compiled
        if any(state.numel() for each in self._looks.latest for state in each.held):
            _prepare_dropout(self.device)
        with ExitStack() as around:
            for eager in self.eagers:
                around.enter_context(eager.capturing(collect))
            if compares:
                around.enter_context(watching(self.eagers, partial(operations_of, seen)))
            # What the host draws in a pass that does not run is drawn by its replay.
            with fork_rng(devices=[], enabled=bool(self._draws)), graph.capturing(self._side.stream, pool):
                yield graph
            norms = [eager.norm for eager in self.eagers]
            graph.norms = [norm for norm in norms if norm is not None]  # of all objectives, or of none
        states = [value for o in self.optimizers for state in o.state.values() for _, value in tensors_in(state)]
        # What is replaced must not give its memory to others.
        graph.held = [*seen.held, *self._modules_and_tensors()[1], *states]
        if compares and (where := self._departure(seen)):
            self._departs(where)
            seen.form = self._called
            self._first_capture = seen
        parameters = [p for eager in self.eagers for p in eager.trained.parameters]
        graph.gradients = [(p, p.grad) for p in parameters] if afresh else self._gradients
        self._shown = graph.gradients
        self._froze()

    def _froze(self) -> None:
        """Note the Python values that a capture has frozen."""
        if not self.has_captures:
            self._frozen = look(self._roots(), kept_by_capture, hold=True)
            relied_on = {id(tensor) for seen in self._looks.latest for tensor in seen.relied_on}
            self._frozen.hold_only(lambda tensor: id(tensor) in relied_on)
            self._compared_at = self._captured_at = self.eagers[0].counts.steps
        self.has_captures, self._stood = True, self._stance()

    def _departure(self, seen: Inspection) -> str | None:
        """The first captured operation that differs from those of the eager step; None where none does."""
        first = self._first_capture or self._looks.made[-1]
        for start in range(0, max(len(seen.work), 1), max(len(first.work), 1)):
            step = Inspection(work=seen.work[start : start + len(first.work)], form=self._called)
            if where := departure(first, step):
                return where
        return None

    def _departs(self, where: str) -> None:
        """Warn or raise: the person's code runs other operations while captured, as some libraries do on purpose."""
        if self.has_captures:  # it was no other when it was captured before
            self._tell_of_stale(
                self._compared_at, f"the operations of an earlier step; it does other work now: {where}"
            )
            raise Departed
        if torch.are_deterministic_algorithms_enabled():
            raise CannotCapture(f"it does other work while it is captured: {where}")
        by_design = any(len(each.waits) for each in self._looks.latest)  # a package waits, and does not in a capture
        if not self._departed and not by_design and self.memory is not None:
            warnings.warn(
                f"while it is captured as a CUDA graph the step does other work than eagerly, which may round otherwise"
                f" and draw other random numbers: {where}. A plan without graph leaves it eager",
                PlanWarning,
                stacklevel=6,
            )
        self._departed = True

    def call(self, batch: Any) -> tuple[Parts, int | Tensor]:
        """One step inside a capture; returns its losses and their count."""
        self._seen_parts, self._called = {}, signature(batch)
        for call in self._calls:
            call(batch, self._size_of(batch))
        return self._seen_parts, self._seen_count

    def replay(self, graph: CapturedGraph, steps: int = 1) -> None:
        """Replay a graph of `steps` steps."""
        self.replays += steps
        graph.replay()
        repeat(self._draws, steps)
        self._show(graph.gradients)
        for eager, norm in zip(self.eagers, graph.norms, strict=False):
            eager.norm = norm

    @property
    def _draws(self) -> Sequence[Draw]:
        """Random numbers drawn on the host that decide nothing, repeated for the rng state."""
        return self._looks.made[-1].draws.made if self._looks.made else ()

    def _schedule(self) -> None:
        if self._after_update is not None:
            for eager in self.eagers:
                self._after_update(eager.trained)

    def _show(self, gradients: Gradients) -> None:
        """Set `.grad` of the parameters to the gradients that a graph writes."""
        if self._shown is not gradients:
            self._shown = gradients
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _size_of(self, batch: Any) -> int | None:
        """The size of micro-batches for a batch; None for the whole batch."""
        portion = None if self.memory is None else self.memory.portion
        return None if portion is None else portion.size_for(self.eagers[0].weighing.items_in(batch))

    # Out of memory

    def want_of_memory(self, error: Exception) -> Failure | None:
        """The out-of-memory failure of a capture; None for another error."""
        first = began_with(error)
        ran_out = self.memory is not None and is_out_of_memory(first)
        return Failure.of(first, self.device) if ran_out else None

    def shrink(self, failure: Failure | None, items: int) -> bool:
        """Choose smaller micro-batches after a capture ran out of memory; returns whether that is possible."""
        if self.memory is None or failure is None or (size := self.memory.portion.of(items)) <= 1:
            return False
        self.forget()
        self.memory.shrink(size, failure)
        return True

    @property
    def _is_sized(self) -> bool:
        """Whether the size of micro-batches is still that of the inspected steps."""
        return self.memory is None or self.memory.portion.limit == self._limit

    def check_size(self) -> None:
        """Drop the graphs where the size of micro-batches has changed."""
        if not self._is_sized:
            self.forget()

    # What a capture froze

    def check(self, *, strictly: bool = False) -> str | None:
        """Drop the graphs where modes, numbers or tensors that they froze have changed; returns a name of it.

        `strictly`: also where they may have.
        """
        if self._hooked is None:
            return None
        stance = self._stance()
        if stance.hooks != self._hooked:
            self.forget()
            self.abandon("hooks were registered or removed, which a captured step would not know of")
        if not self.has_captures:
            return None
        stood = stance == self._stood
        moved = self._frozen.moved(strictly=strictly)
        if moved or not stood:
            self.forget()
        if not stood:
            self.levers.revert()
            self.levers.apply()  # a state that was loaded brings settings of its own
        return moved[0][0] if moved else None if stood else "what a capture freezes"

    def check_step(self) -> None:
        """Check before a step of a loop by hand, between whose steps the person may change anything.

        Where captures do not last, they end.
        """
        if self._hooked is None:
            return
        self._shown = None  # somebody may have cleared the gradients
        begun = self._captured_at
        if (changed := self.check(strictly=True)) is not None:
            self._brief += self.eagers[0].counts.steps - begun < LASTING
            if self._brief >= BRIEF:
                self.abandon(f"{changed} changes often between steps, and a capture freezes it")

    def audit(self) -> None:
        """Find frozen numbers of the person's code that have changed, and warn of steps replayed with the old."""
        if not self.has_captures or self.memory is None:
            return
        if moved := self._frozen.moved():
            name, then, now = moved[0]
            self._tell_of_stale(self._compared_at, f"{name}={then}, which is {now} now")
        self._compared_at = self.eagers[0].counts.steps

    @property
    def comparison_is_due(self) -> bool:
        """Whether an eager forward pass must be compared with the captured one before the next replay."""
        due = self.replays >= COMPARE_EVERY and self.has_captures and self.memory is not None
        return due and self.eagers[0].phase[0]

    def compare(
        self, batch: Any, transform: Callable[[Any], Any] | None = None, seen: Sequence[Inspection] = ()
    ) -> None:
        """Compare an eager forward pass with the captured one, and drop the captures where they differ.

        The state is restored afterwards. `transform` is captured with the step, `seen` are inspections of it.
        """
        since = self._compared_at
        self.replays = 0
        self.audit()
        if not self.has_captures or not self._has_room or self._first_capture is not None:
            return  # what is eager was another thing from the start
        assert self.memory is not None
        comparison = Comparison(*seen[-1:], self._looks.made[-1])

        @contextmanager
        def compared() -> Iterator[None]:
            with made_on_device(), comparison:
                yield

        before, is_comparable = PassSnapshot(self.memory.modules, self.device), False
        with self._side.running(), self.levers.around(), watching(self.eagers, compared, on_ranks=False):
            before.take(batch)
            try:
                if transform is not None:
                    with compared():
                        batch = transform(batch)
                is_comparable = signature(batch) == self._looks.made[-1].form
                batch = self.levers.inputs(batch)
                for eager in self.eagers:
                    eager.forward(batch, self._size_of(batch))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._has_room = False
            finally:
                before.restore()
        if self._has_room and is_comparable and (where := comparison.departure()):
            self._tell_of_stale(since, f"the operations of an earlier step; it does other work now: {where}")

    def _tell_of_stale(self, since: int, what: str) -> None:
        """Drop captures that are not what Python asks for, and warn of the steps that were replayed with them."""
        first, last = since + 1, self.eagers[0].counts.steps
        self._stale += 1
        again = "it is captured again" if self._stale < STALE else "it is not captured any more"
        warnings.warn(
            f"steps {first} to {last} may have been replayed with {what}: a CUDA graph keeps what Python had when it"
            f" was captured; {again}. To change a number while captures are used, hold it in a tensor on the device and"
            " write into that",
            PlanWarning,
            stacklevel=5,
        )
        if self._stale >= STALE:
            self.abandon("")
        self.forget()

    def _stance(self) -> "Stance":
        """The present `Stance`, in one walk over the layers: a short epoch takes less than a millisecond."""
        modules, tensors = self._modules_and_tensors()
        modes = [module.training for module in modules]
        weights = [(t.data_ptr(), t.requires_grad) for t in tensors]
        states = [id(value) for o in self.optimizers for state in o.state.values() for value in state.values()]
        groups = [(id(g), g.get("fused"), g.get("capturable")) for o in self.optimizers for g in o.param_groups]
        hooks = [hook for module in modules for hook in module_hooks(module)]
        hooks += [hook for tensor in tensors for hook in gradient_hooks(tensor)]
        hooks += [hook for o in self.optimizers for hook in step_hooks(o)]
        return Stance(modes, weights, states, groups, hooks, settings_around(self.device))

    def _modules_and_tensors(self) -> tuple[list[nn.Module], list[Tensor]]:
        """The layers of the model and of a criterion that is a module, and their parameters and buffers."""
        roots = [self.model] if self.memory is None else self.memory.modules
        modules = [module for root in roots for module in root.modules()]
        tensors: list[Tensor | None] = []
        for module in modules:
            tensors += parameters_of(module).values()
            tensors += buffers_of(module).values()
        return modules, [tensor for tensor in tensors if tensor is not None]

    def _roots(self) -> dict[str, object]:
        several = len(self.eagers) > 1
        objectives = {e.trained.name if several else "objective": e.trained.objective for e in self.eagers}
        return {"model": self.model, **objectives, "device_transform": self.transform}


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
        self._rates: Rates | None = None
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
        assert self._rates is not None
        if self._rates.changed():
            return None  # it is found and said when a batch of the usual shape comes
        copy_all(graph.buffers, [tensor for _, tensor in tensors_in(batch)])
        self._rates.send([self._rates.now()])
        self._step.replay(graph)
        return self._step.taken(graph, updated=True)

    def _is_possible(self) -> bool:
        step = self._step
        return step.is_ready and step.plan.accumulate == 1 and len(self._graphs) < MOST_SHAPES

    def _captured(self, batch: Any, form: Hashable) -> CapturedGraph | None:
        step = self._step
        if self._pool is None:
            self._pool = backend_of(step.device).graph_pool()
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
        graph.buffers = buffers
        self._graphs[form] = graph
        return graph


class Stance(NamedTuple):
    """State that a capture depends on and a person may change between epochs."""

    modes: list[bool]  # of the layers
    weights: list[tuple[int, bool]]  # where parameters and buffers lie, and whether they get gradients
    states: list[int]  # of the optimizers, tensor by tensor
    groups: list[tuple[int, Any, Any]]  # of parameters, and how they are updated
    hooks: list[Callable[..., Any]]
    around: tuple[Hashable, ...]  # PyTorch's settings around a step


def settings_around(device: torch.device) -> tuple[Hashable, ...]:
    """PyTorch's settings that a person may turn on around a step."""
    kind = device.type
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        fp32_matmul_precision(),
    )


class Departed(CannotCapture):
    """The step runs other operations than in its last capture: it is inspected and captured again."""


def called_inside(
    context: Callable[[], AbstractContextManager[Any]], objective: Objective, model: nn.Module, batch: Any
) -> Any:
    """Call an objective inside a context."""
    with context():
        return objective(model, batch)


@contextmanager
def watching(
    eagers: Sequence[EagerStep], context: Callable[[], AbstractContextManager[Any]], *, on_ranks: bool = True
) -> Iterator[None]:
    """Call objectives inside a context that watches them, below DDP where `on_ranks`."""
    before = [eager.objective for eager in eagers]
    for eager in eagers:
        watched = partial(called_inside, context, eager.trained.objective)
        if eager.across is not None and on_ranks:
            eager.across.watched = watched
        else:
            eager.objective = watched
    try:
        yield
    finally:
        for eager, objective in zip(eagers, before, strict=True):
            eager.objective = objective
            if eager.across is not None:
                eager.across.watched = None


def _prepare_dropout(device: torch.device) -> None:
    """Let PyTorch make cuDNN's dropout state of recurrent layers now, which it cannot during a capture."""
    layer = nn.LSTM(1, 1, num_layers=2, dropout=0.5, device="meta").to_empty(device=device)  # without a draw
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        layer(torch.zeros(1, 1, 1, device=device))
