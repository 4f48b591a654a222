"""`Weighing`: what micro-batches, or the batches of an accumulation window, weigh beside one another."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from hotloop._torch import BatchNorm
from hotloop.device.backend import is_capturing
from hotloop.errors import PlanWarning
from hotloop.memory.micro_batches import HOW_TO_SAY, items_along, joined
from hotloop.objective.comparison import (
    GIVEN,
    ITEMS,
    SUM,
    PartsComparison,
    PartWeight,
    Probe,
    Verdict,
    observed,
    way_of_pytorch,
)
from hotloop.objective.objectives import Losses, Objective, items_in, shapes_in
from hotloop.objective.reductions import ClassCounts, Denominators, Number
from hotloop.plan import Split
from hotloop.printing.text import shorten
from hotloop.values.reach import CallEffects

LATER = (8, 64)  # cuts that are compared again, whatever their shape
UNDECIDED = 3  # comparisons in a row that leave several ways
SHAPES = 8  # of batches whose first cut is compared; later ones are like them
_WARNINGS = {
    "effects": "your code changes {names} in each call, and was called once more than the step does, to compare the"
    " loss of the whole batch with that of its micro-batches",
    "unknown": "what the loss is the mean over is not known, and it could not be compared with that of the whole"
    " batch{because}: parts are weighed by items. fix: {how}",
    "empty": "a batch, or a part of one, has a loss though nothing in it counts, and is left out. fix: {how}",
    "first": "the batches of ranks are {way}, as a comparison has shown, and those of the first step were weighed in"
    " another way. fix: return (loss, weight) from an objective, weight being what the loss is the mean over",
    "eager": "what the loss is the mean over is counted by the objective itself, which compiled code does not show: it"
    " runs eagerly in micro-batches and in accumulation. fix: return (loss, weight) from the objective",
    "differs": "{differs}: accumulate averages the losses of its batches, which is not the loss of all of them"
    " together. fix: {how}",
    "norms": "batch normalisation ({names}) sees each {what} by itself, so that what it learns depends on their size."
    " fix: put those layers in eval mode, or use GroupNorm or LayerNorm",
}


@dataclass(frozen=True, slots=True)
class _FirstBatch:
    """The first batch that accumulates: it counts as 1 until a comparison shows what it weighs."""

    batch: Any  # None once it was compared: no batch is held for longer
    losses: Losses  # without their graph
    counts: Denominators
    way: PartWeight  # by which it was weighed; on ranks, weights were updated with that


@dataclass(slots=True)
class _Known:
    """What was found out about the batches of one objective."""

    verdicts: dict[Any, Verdict] = field(default_factory=dict)  # by shapes, and the size of the parts
    own: dict[Any, PartWeight] = field(default_factory=dict)  # of losses that are PyTorch's, by shapes
    cuts: int = 0
    open: int = 0  # comparisons in a row that left several ways
    first: _FirstBatch | None = None

    def is_due(self, key: Any, later: Sequence[int], alike: int) -> bool:
        """Whether another cut is to be compared; `alike`: how many shapes were, of parts of this size."""
        self.cuts += 1
        is_new = key not in self.verdicts and alike < SHAPES
        return is_new or self.cuts in later or 0 < self.open < UNDECIDED

    def keep(self, key: Any, verdict: Verdict) -> None:
        self.verdicts[key] = verdict
        self.open = self.open + 1 if verdict.is_open else 0

    def take_first_batch(self) -> Any:
        """The first batch, which is not held for longer."""
        if self.first is None:
            return None
        batch, self.first = self.first.batch, replace(self.first, batch=None)
        return batch


class Weighing:
    """How the losses of micro-batches, or of the batches of an accumulation window, make up that of the whole.

    Some ways are likely: what PyTorch's losses are means over, items, a sum, what a loss is divided by. At each new
    size of parts, and a few times later, the loss of a whole batch and its gradient are compared with those of its
    parts, on copies, without a trace; the first way that gives the same holds.
    `may_probe` says whether the person's code may be called more often than a step does. With `roots` its calls are
    looked at first: nothing is compared where one changes what cannot be restored.
    """

    def __init__(
        self,
        split: Split = "auto",
        *,
        sums: bool = False,
        later: Sequence[int] = LATER,
        compiles: bool = False,
        on_ranks: bool = False,
        may_probe: bool = True,
        roots: Callable[[], Mapping[str, object]] | None = None,
    ) -> None:
        self.split, self._may_probe = split, may_probe
        self.items_in: Callable[[Any], int] = (  # how many items a batch holds
            items_in if isinstance(split, str) else partial(items_along, split=split)
        )
        self.calls = CallEffects(
            lambda names: self.tell("effects", names=shorten(names, 3)), roots
        )  # of the objectives
        self._default = SUM if sums else ITEMS
        self._sums, self._later, self._compiles, self._on_ranks = sums, later, compiles, on_ranks
        self._known: defaultdict[str, _Known] = defaultdict(_Known)  # by the names of objectives
        self._told: set[str] = set()

    def take_over(self, other: "Weighing") -> None:
        """Know what another has found out about the same objectives."""
        self.calls = other.calls
        self._known, self._told = other._known, other._told

    def verdict(self, name: str, probe: Callable[[], Probe], batch: Any, items: int, size: int | None) -> Verdict:
        """How batches of this shape are weighed; `size`: they are cut into micro-batches, else they accumulate.

        `probe` is asked for where a comparison is due: of batches that accumulate before the pass of the second, since
        the first is looked at.
        """
        if self.split == "items":
            return Verdict(self._default)
        known, key = self._known[name], (shapes_in(batch), size)
        alike = [each for (_, other), each in known.verdicts.items() if other == size]
        if size is None:
            if (told := next((each for each in alike if each.differs is not None), None)) is not None:
                return told
            if not alike and (known.first is None or not self.calls.are_known):
                return Verdict()
        verdict = known.verdicts.get(key)
        if known.is_due(key, self._later, len(alike)):
            verdict = self._compared(known, key, probe(), batch, items, size) or verdict
        return verdict or next(reversed(alike), Verdict())

    def known(self, name: str, batch: Any) -> Verdict:
        """What was found out about batches of this shape, or of others, without a comparison."""
        if self.split == "items":
            return Verdict(self._default)
        verdicts, shapes = self._known[name].verdicts, shapes_in(batch)
        alike = [verdict for (other, _), verdict in verdicts.items() if other == shapes]
        return [Verdict(), *verdicts.values(), *alike][-1]

    def _compared(
        self, known: _Known, key: Any, probe: Probe, batch: Any, items: int, size: int | None
    ) -> Verdict | None:
        """The verdict of a comparison, which is kept; None where there can be none."""
        earlier = known.take_first_batch()
        if not self._may_be_called:
            return None
        given = [(batch, items, size)] if items > 1 else []
        if earlier is not None and size is None and isinstance(self.split, str) and not (known.own and given):
            before = self.items_in(earlier)
            if (both := joined(earlier, batch, before, items)) is not None:  # as they accumulate
                given = [(both, before + items, max(before, items)), *given]
        if not given:
            return None
        may_repeat = self.calls.before_call(probe.modules, is_extra=True)
        probe = replace(probe, learns=probe.learns and not known.own)
        found = [probe.compared(*each, self.split, may_repeat) for each in given]
        verdicts = [each.verdict(sums=self._sums) if isinstance(each, PartsComparison) else each for each in found]
        told = [each for each in verdicts if each is not None]
        verdict = next((each for each in told if each.differs is not None), told[0] if told else None)
        if verdict is not None:
            known.keep(key, verdict)
        return verdict

    @property
    def _may_be_called(self) -> bool:
        return not self.calls.names and self._may_probe and not is_capturing()

    def looked_at(self, model: nn.Module) -> AbstractContextManager[None]:
        """Look at a call of the person's code, after which it may be known what it changes in Python."""
        return nullcontext() if is_capturing() else self.calls.looked_at([model])

    def losses(
        self,
        verdict: Verdict,
        name: str,
        objective: Objective,
        plain: Objective,
        model: nn.Module,
        batch: Any,
        items: int,
        weight: Number | None = None,
        *,
        is_part: bool = False,
    ) -> Losses:
        """The losses of a batch or a part of one, and their weight; `plain` is `objective`, not compiled or watched."""
        known = self._known[name]
        way = GIVEN if weight is not None else verdict.way or known.own.get(shapes_in(batch))
        if way is None:
            counts: Denominators | ClassCounts | None = (every := Denominators())
            with self.looked_at(model):
                losses = observed(objective, plain, model, batch, every, name, items)
            way = self._uncompared(known, losses, every, batch, items, is_part=is_part)
        else:
            counts = way.counter()
            losses = observed(objective, plain, model, batch, counts, name, items)
            if isinstance(counts, Denominators) and self._compiles and objective is not plain:
                self.tell("eager")
        weight = counts.value_at(way.place) if counts is not None else weight
        losses = self._weighed(losses, way, items, weight, reads=is_part)
        if verdict.way is not None and known.first is not None:
            first, known.first = known.first, None
            losses = replace(losses, first=self._weight_of(first, verdict.way))
        return losses

    def _weighed(
        self, losses: Losses, way: PartWeight, items: int, weight: Number | None, *, reads: bool = False
    ) -> Losses:
        """Losses with their weight; `reads`: the host is to know where nothing counts: a gradient may be 0/0 there."""
        if losses.is_counted and way is not GIVEN:
            return losses
        if way.kind == "sum":
            return Losses(losses.parts, items, is_sum=True)
        if way.kind == "items":
            return Losses(losses.parts, items, weight=items * way.ratio)
        weight = 0.0 if weight is None else weight  # where the objective returned before it came to the count
        is_read = isinstance(weight, Tensor) and (weight.is_cpu or (reads and not way.is_of_classes))
        if is_read and not is_capturing():
            weight = float(weight)
        if not isinstance(weight, Tensor) and not (weight or way.drops) and losses.total.detach().item():
            self.tell("empty")
        size = max(items, round(items * way.ratio))
        return Losses(losses.parts, items, weight=weight, size=size, by_values=True)

    def _weight_of(self, first: _FirstBatch, way: PartWeight) -> float | None:
        """What the first batch should have weighed; None where it did, or where ranks have updated weights with it."""
        if way == first.way:
            return None
        if self._on_ranks:
            self.tell("first", way=way)
            return None
        weight = first.counts.value_at(way.place)
        return float(self._weighed(first.losses, way, int(first.losses.count), weight).mass)

    def _uncompared(
        self, known: _Known, losses: Losses, counts: Denominators, batch: Any, items: int, *, is_part: bool
    ) -> PartWeight:
        """The way of losses that were not compared."""
        if losses.is_counted:
            return ITEMS
        ways = {way_of_pytorch(counts, value, items) for value in losses.parts.values()}
        own = ways.pop() if len(ways) == 1 else None
        if own is not None:
            known.own[shapes_in(batch)] = own
        if known.first is None and not is_part:  # a comparison is still to come
            counts.forget()
            places = [place for place, count in enumerate(counts.counts) if count.by_values] if self._on_ranks else []
            way = own or (PartWeight("count", places[-1]) if places else self._default)
            known.first = _FirstBatch(batch, Losses({"": losses.total.detach()}, items), counts, way)
            return way
        if own is None and not is_capturing():
            self._tell_of_unknown(counts, items)
        return own or self._default

    def ways(
        self,
        losses: Losses,
        counts: Denominators,
        batch: Any,
        items: int,
        probe: Probe | None,
        last: Mapping[str, PartWeight],
    ) -> Mapping[str, PartWeight] | None:
        """The way of each of several losses, as an evaluation reports them; None where another batch has to tell.

        `last` are those of batches of other shapes.
        """
        own = {name: way_of_pytorch(counts, value, items) for name, value in losses.parts.items()}
        if losses.is_counted or all(own.values()):
            return {name: way or ITEMS for name, way in own.items()}
        found = None
        if items > 1 and probe is not None and self._may_be_called:
            found = probe.compared(batch, items, None, self.split)
        if isinstance(found, PartsComparison):
            verdicts = {name: found.verdict(name, sums=self._sums) for name in own}
            if not last and any(each.is_open and not found.whole.losses[name] for name, each in verdicts.items()):
                return None
            return {name: each.way or ITEMS for name, each in verdicts.items()}
        if last or (items == 1 and probe is not None):
            return last or None
        self._tell_of_unknown(counts, items)
        return {name: way or self._default for name, way in own.items()}

    def _tell_of_unknown(self, counts: Denominators, items: int) -> None:
        if items > 1 or any(count.by_values for count in counts.counts):  # else all ways weigh the same
            names = shorten(self.calls.names or [], 3)
            because = f", because your code changes what cannot be restored ({names})" if names else ""
            self.tell("unknown", because=because)

    def tell_of_norms(self, model: nn.Module, what: str) -> None:
        """Say once that batch normalisation sees less than the whole batch."""
        if "norms" not in self._told and self.split != "items" and (names := norms_in(model)):
            self.tell("norms", names=shorten(names, 2), what=what)
        self._told.add("norms")

    def tell(self, key: str, **words: object) -> None:
        """Warn once, in one of the ways that there are."""
        if key not in self._told:
            self._told.add(key)
            warnings.warn(_WARNINGS[key].format(how=HOW_TO_SAY, **words), PlanWarning, stacklevel=2)


def norms_in(model: nn.Module) -> list[str]:
    """Names of the layers that normalise by the batch that they see."""
    return [name or type(m).__name__ for name, m in model.named_modules() if isinstance(m, BatchNorm) and m.training]
