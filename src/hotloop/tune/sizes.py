"""`BatchSizes`: the shapes of the first batches of a run, and which dimensions a compilation must leave dynamic."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hotloop._torch import map_leaves
from hotloop.levers.compile import Varying, sizes_of, tensors_of, varying_between
from hotloop.plan import Plan
from hotloop.step.compilation import CompiledObjective, worth_compiling_for
from hotloop.step.inspection import signature
from hotloop.step.objectives import TrainedObjective


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

    def others(self, batch: Any) -> list[Any]:
        """Batches of zeros in the other shapes, where these differ in sizes alone."""
        if not self.varying(batch):
            return []
        alike = [each for each in self._seen.values() if varying_between(batch, each)]
        return [other for each in alike if varying_between(batch, other := _resized(batch, tensors_of(each)))]

    def for_all(
        self, objectives: Sequence[TrainedObjective], plan: Plan, batch: Any
    ) -> dict[str, CompiledObjective] | None:
        """Objectives compiled once for all sizes; None where sizes do not vary."""
        varying = self.varying(batch)
        if plan.compile == "blocks" or not varying:
            return None
        return {each.name: CompiledObjective(each.objective, plan.compile, varying) for each in objectives}


def _resized(batch: Any, tensors: Iterator[Tensor]) -> Any:
    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.zeros(next(tensors).shape, dtype=leaf.dtype, device=leaf.device)

    return map_leaves(zeros, batch)
