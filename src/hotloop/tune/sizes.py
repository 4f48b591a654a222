"""`BatchSizes`: the shapes of the first batches of a run, and which dimensions a compilation must leave dynamic."""

from collections.abc import Hashable, Sequence
from typing import Any

from hotloop.levers.compile import Varying, sizes_of, varying_between
from hotloop.plan import Plan
from hotloop.step.compilation import CompiledObjective, worth_compiling_for
from hotloop.step.inspection import signature
from hotloop.step.trained_objectives import TrainedObjective


class BatchSizes:
    """The shapes of the batches so far, without their values."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Any] = {}  # by their form

    def note(self, batch: Any) -> None:
        """Note the shapes of a batch."""
        self._seen.setdefault(signature(batch), sizes_of(batch))

    def vary(self) -> bool:
        """Whether shapes vary beyond the smaller last batch of an epoch."""
        several = [*self._seen.values()]
        if len(several) != 2:
            return len(several) > 2
        varying = varying_between(*several)
        return varying is None or worth_compiling_for(varying)

    def varying(self, batch: Any) -> Varying:
        """The dimensions in which batches differ from this one; none where dynamic shapes are not worth it."""
        between = (varying_between(batch, other) or () for other in self._seen.values())
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
