"""`Frozen`: what captures froze of Python's state, and whether a replay still is the step that Python asks for."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hotloop._torch import gradient_hooks, module_hooks, step_hooks
from hotloop.errors import PlanWarning
from hotloop.levers.tf32 import fp32_matmul_precision
from hotloop.memory.oom import is_out_of_memory
from hotloop.step.captured_graph import CannotCapture, CaptureStream
from hotloop.step.constants import made_on_device
from hotloop.step.eager_calls import EagerCalls, watching
from hotloop.step.inspection import Comparison, Inspection, Looks, departure, signature
from hotloop.values.reach import ReachableState, kept_by_capture, look
from hotloop.values.snapshot import PassSnapshot

COMPARE_EVERY = 500  # replays after which an eager forward pass is compared with what was captured
LASTING, BRIEF = 100, 3  # steps that captures are to last in a loop by hand, and how often they may not
STALE = 2  # times that it differed, after which nothing is captured any more


class Departed(CannotCapture):
    """The step runs other operations than in its last capture: it is inspected and captured again."""


class Frozen:
    """What captures froze, and whether it holds. `forget` drops the captures, `abandon` ends them for a reason."""

    def __init__(self, calls: EagerCalls, *, forget: Callable[[], None], abandon: Callable[[str], None]) -> None:
        self._calls, self._forget, self._abandon = calls, forget, abandon
        self._transform: object = None  # of batches, where it is captured together with steps
        self._hooks: list[Callable[..., Any]] | None = None  # that were there before the first inspection
        self._known_at = 0  # the step up to which captures are known to be what Python asks for
        self._captured_at = 0  # the step at which the first of the present captures was made
        self._stale = self._brief = 0  # times that captures were not what Python asks for, and did not last
        self._departed = False  # whether the captured operations are others than the eager ones
        self.clear()

    def clear(self) -> None:
        """Note that there are no captures any more."""
        self.has_captures = False
        self.replays = 0  # since the last forward pass that was compared with the captured one
        self._has_room = True  # for an eager forward pass beside the captures
        self._values = ReachableState()  # numbers that Python had when the step was captured
        self._state: StepState | None = None
        self._first: Inspection | None = None  # of the first capture, where it does other work than the eager step

    def include(self, transform: object) -> None:
        """Note a transform of batches that is captured together with steps."""
        self._transform = transform

    def note_hooks(self) -> None:
        """Note the hooks that are there; captures know of no other."""
        if self._hooks is None:
            self._hooks = StepState.of(self._calls).hooks

    def note_capture(self, captured: Inspection, looks: Looks) -> None:
        """Compare the operations of a capture with the eager ones, and note the Python values that it froze.

        Raises `Departed` or `CannotCapture` where a replay would be another step.
        """
        calls = self._calls
        if captured.form is not None and (where := _departure(self._first or looks.made[-1], captured)):
            self._tell_of_departure(where, looks)
            self._first = captured
        if not self.has_captures:
            self._values = look({**calls.roots(), "device_transform": self._transform}, kept_by_capture, hold=True)
            relied_on = {id(tensor) for seen in looks.latest for tensor in seen.relied_on}
            self._values.hold_only(lambda tensor: id(tensor) in relied_on)
            self._known_at = self._captured_at = calls.steps
        self.has_captures, self._state = True, StepState.of(calls)

    def check(self, *, strictly: bool = False) -> str | None:
        """Drop the graphs where modes, numbers or tensors that they froze have changed; returns a name of it.

        `strictly`: also where they may have.
        """
        if self._hooks is None:
            return None
        state = StepState.of(self._calls)
        if state.hooks != self._hooks:
            self._forget()
            self._abandon("hooks were registered or removed, which a captured step would not know of")
        if not self.has_captures:
            return None
        is_same = state == self._state
        moved = self._values.moved(strictly=strictly)
        if moved or not is_same:
            self._forget()
        if not is_same:
            self._calls.levers.revert()
            self._calls.levers.apply()  # a state that was loaded brings settings of its own
        return moved[0][0] if moved else None if is_same else "what a capture freezes"

    def check_step(self) -> None:
        """Check before a step of a loop by hand, between whose steps the person may change anything.

        Where captures do not last, they end.
        """
        begun = self._captured_at
        if (changed := self.check(strictly=True)) is not None:
            self._brief += self._calls.steps - begun < LASTING
            if self._brief >= BRIEF:
                self._abandon(f"{changed} changes often between steps, and a capture freezes it")

    def audit(self) -> None:
        """Find frozen numbers of the person's code that have changed, and warn of steps replayed with the old."""
        if not self.has_captures or self._calls.memory is None:
            return
        if moved := self._values.moved():
            name, then, now = moved[0]
            self._tell_of_stale(self._known_at, f"{name}={then}, which is {now} now")
        self._known_at = self._calls.steps

    @property
    def comparison_is_due(self) -> bool:
        """Whether an eager forward pass must be compared with the captured one before the next replay."""
        due = self.replays >= COMPARE_EVERY and self.has_captures and self._calls.memory is not None
        return due and self._calls.eagers[0].phase[0]

    def compare(
        self,
        batch: Any,
        looks: Looks,
        side: CaptureStream,
        transform: Callable[[Any], Any] | None = None,
        seen: Sequence[Inspection] = (),
    ) -> None:
        """Compare an eager forward pass with the captured one, and drop the captures where they differ.

        The state is restored afterwards. `transform` is captured with the step, `seen` are inspections of it.
        """
        calls, since = self._calls, self._known_at
        self.replays = 0
        self.audit()
        if not self.has_captures or not self._has_room or self._first is not None:
            return  # what is eager was another thing from the start
        assert calls.memory is not None
        comparison = Comparison(*seen[-1:], looks.made[-1])

        @contextmanager
        def compared() -> Iterator[None]:
            with made_on_device(), comparison:
                yield

        before, is_comparable = PassSnapshot(calls.memory.modules, calls.device), False
        with side.running(), calls.levers.around(), watching(calls.eagers, compared):
            before.take(batch)
            try:
                if transform is not None:
                    with compared():
                        batch = transform(batch)
                is_comparable = signature(batch) == looks.made[-1].form
                batch = calls.levers.inputs(batch)
                for eager in calls.eagers:
                    eager.forward(batch, calls.size_of(batch))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._has_room = False
            finally:
                before.restore()
        if self._has_room and is_comparable and (where := comparison.departure()):
            self._tell_of_stale(since, f"the operations of an earlier step; it does other work now: {where}")

    def _tell_of_departure(self, where: str, looks: Looks) -> None:
        """Warn or raise: the person's code runs other operations while captured, as some libraries do on purpose."""
        if self.has_captures:  # it was no other when it was captured before
            self._tell_of_stale(self._known_at, f"the operations of an earlier step; it does other work now: {where}")
            raise Departed
        if torch.are_deterministic_algorithms_enabled():
            raise CannotCapture(f"it does other work while it is captured: {where}")
        by_design = any(len(each.waits) for each in looks.latest)  # a package waits, and does not in a capture
        if not self._departed and not by_design and self._calls.memory is not None:
            warnings.warn(
                f"while it is captured as a CUDA graph the step does other work than eagerly, which may round otherwise"
                f" and draw other random numbers: {where}. A plan without graph leaves it eager",
                PlanWarning,
                stacklevel=7,
            )
        self._departed = True

    def _tell_of_stale(self, since: int, what: str) -> None:
        """Drop captures that are not what Python asks for, and warn of the steps that were replayed with them."""
        first, last = since + 1, self._calls.steps
        self._stale += 1
        again = "it is captured again" if self._stale < STALE else "it is not captured any more"
        warnings.warn(
            f"steps {first} to {last} may have been replayed with {what}: a CUDA graph keeps what Python had when it"
            f" was captured; {again}. To change a number while captures are used, hold it in a tensor on the device and"
            " write into that",
            PlanWarning,
            stacklevel=6,
        )
        if self._stale >= STALE:
            self._abandon("")
        self._forget()


class StepState(NamedTuple):
    """State that a capture depends on and a person may change between steps."""

    modes: list[bool]  # of the layers
    weights: list[tuple[int, bool]]  # where parameters and buffers lie, and whether they get gradients
    states: list[int]  # of the optimizers, tensor by tensor
    groups: list[tuple[int, Any, Any]]  # of parameters, and how they are updated
    hooks: list[Callable[..., Any]]
    around: tuple[Hashable, ...]  # PyTorch's settings around a step

    @classmethod
    def of(cls, calls: EagerCalls) -> "StepState":
        """The present state, in one walk over the layers: a short epoch takes less than a millisecond."""
        modules, tensors = calls.modules_and_tensors()
        modes = [module.training for module in modules]
        weights = [(t.data_ptr(), t.requires_grad) for t in tensors]
        states = [id(value) for o in calls.optimizers for state in o.state.values() for value in state.values()]
        groups = [(id(g), g.get("fused"), g.get("capturable")) for o in calls.optimizers for g in o.param_groups]
        hooks = [hook for module in modules for hook in module_hooks(module)]
        hooks += [hook for tensor in tensors for hook in gradient_hooks(tensor)]
        hooks += [hook for o in calls.optimizers for hook in step_hooks(o)]
        return cls(modes, weights, states, groups, hooks, settings_around(calls.device))


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


def _departure(first: Inspection, captured: Inspection) -> str | None:
    """The first captured operation that differs from those of one step; None where none does."""
    for start in range(0, max(len(captured.work), 1), max(len(first.work), 1)):
        step = Inspection(work=captured.work[start : start + len(first.work)], form=captured.form)
        if where := departure(first, step):
            return where
    return None
