"""`FirstSteps`: what the first steps of a run show: lasting effects, what the host does, and the shapes of batches."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

from hotloop.device.backend import backend_of
from hotloop.levers.compile import Varying, sizes_of, varying_between
from hotloop.plan import Plan
from hotloop.printing.text import error_in_a_line
from hotloop.step.compilation import CompiledObjective, worth_compiling_for
from hotloop.step.eager_calls import watching
from hotloop.step.inspection import Inspection, host_noted, signature
from hotloop.step.norms import HasStep
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.tune.subject import Subject
from hotloop.values.reach import ReachableState, Skip, look

T = TypeVar("T")


class Reaching(HasStep, Protocol):
    """The part of a loop that is watched."""

    def roots(self, more: Mapping[str, object] | None = None) -> dict[str, object]:
        """Objects from which the present step may reach Python state, by the names that a person knows."""


class FirstSteps:
    """Watches the first steps of a run."""

    def __init__(self, subject: Subject, loop: Reaching) -> None:
        self.left = 0  # steps still to be watched
        self.seconds = 0.0  # that looking has taken
        self.effects: dict[str, None] = {}  # names of what they have changed for good
        self.on_host = Inspection()  # of the last of them
        self._subject, self._loop = subject, loop
        self._forms: dict[Hashable, Any] = {}  # of batches, without their values

    def watch_steps(self, number: int) -> None:
        """Watch so many steps from now on."""
        self.left = number

    def watch(self, what: dict[str, object], call: Callable[[], T]) -> T:
        """Call the person's code, and note which changes of it could not be restored."""
        roots, skip = self._loop.roots(what), self._subject.restorable()
        before = self._looked(roots, skip)
        result = call()
        after = self._looked(roots, skip)
        if before is not None and after is not None:
            self.effects |= dict.fromkeys(before.changes(after))
        return result

    def _looked(self, roots: dict[str, object], skip: Skip) -> ReachableState | None:
        start = time.perf_counter()
        try:
            return look(roots, skip)
        except Exception as error:  # noqa: BLE001  # of an object of the person's, which a step may do without
            self.effects.setdefault(f"an object that cannot be looked at ({error_in_a_line(error)})")
            return None
        finally:
            self.seconds += time.perf_counter() - start

    def watch_step(self, call: Callable[[], T]) -> T:
        """Watch a real step, and note of the last one what it does on the host."""
        left, self.left = self.left, 0
        device = self._subject.device
        noted = partial(host_noted, device, self.on_host)
        is_noted = left == 1 and backend_of(device).can_capture
        try:
            with watching(self._loop.step.eagers, noted) if is_noted else nullcontext():
                return self.watch({}, call)
        finally:
            self.left = left - 1

    def note(self, batch: Any) -> None:
        """Note the shapes of a batch."""
        self._forms.setdefault(signature(batch), sizes_of(batch))

    def vary(self) -> bool:
        """Whether shapes vary beyond the smaller last batch of an epoch."""
        several = [*self._forms.values()]
        if len(several) != 2:
            return len(several) > 2
        varying = varying_between(*several)
        return varying is None or worth_compiling_for(varying)

    def varying(self, batch: Any) -> Varying:
        """The dimensions in which batches differ from this one; none where dynamic shapes are not worth it."""
        between = (varying_between(batch, other) or () for other in self._forms.values())
        found = frozenset[tuple[int, int]]().union(*between)
        return found if worth_compiling_for(found) else frozenset()

    def for_all(
        self, objectives: Sequence[TrainedObjective], plan: Plan, batch: Any
    ) -> dict[str, CompiledObjective] | None:
        """Objectives compiled once for all sizes; None where sizes do not vary."""
        varying = self.varying(batch)
        if plan.compile == "blocks" or not varying:
            return None
        return {each.name: CompiledObjective(each.objective, plan.compile, varying) for each in objectives}
