"""`Weighing`: what micro-batches, or the batches of an accumulation window, weigh beside one another."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from hotloop._torch import BatchNorm, accumulated_hooks
from hotloop.errors import BadArgument, DoesNotFit, HotloopError, PlanWarning
from hotloop.memory.micro_batches import bounds, items_along, joined, part_of
from hotloop.memory.oom import is_capturing
from hotloop.objective.comparison import (
    GIVEN,
    ITEMS,
    OWN,
    SUM,
    PartsComparison,
    PartWeight,
    Probe,
    Verdict,
    watched,
    way_of_pytorch,
)
from hotloop.objective.objectives import Losses, Objective, items_in, losses_of, shapes_in, uniform
from hotloop.objective.reductions import ClassCounts, Denominators, eager
from hotloop.plan import Split
from hotloop.printing.text import shorten
from hotloop.values.effects import CallEffects

LATER = (8, 64)  # cuts that are compared again, whatever their shape
UNDECIDED = 3  # comparisons in a row that leave several ways
SHAPES = 8  # of batches whose first cut is compared; later ones are like them
_NOTHING = nullcontext()
_HOW_TO_SAY = (
    "return (loss, weight) from an objective, weight being what the loss is the mean over; or say how a batch is cut:"
    " split=1 where time comes first, split=function with (batch, start, stop) → part or (part, weight); or accept what"
    ' differs with split="items"'
)


@dataclass(slots=True)
class _Known:
    """What was found out about the batches of one objective."""

    verdicts: dict[Any, Verdict] = field(default_factory=dict)  # by shapes, and the size of the parts
    own: dict[Any, PartWeight] = field(default_factory=dict)  # of losses that are PyTorch's, by shapes
    cuts: int = 0
    open: int = 0  # comparisons in a row that left several ways
    first: "tuple[Any, Losses, Denominators] | None" = (
        None  # the first batch that accumulates, which counts as 1 until then
    )
    is_own: bool = False  # whether the loss is one of PyTorch's
    guess: PartWeight | None = None  # the way by which the first batch was weighed, for its ranks have updated with it


class Weighing:
    """How the losses of micro-batches, or of the batches of an accumulation window, make up that of the whole.

    Some ways are likely: what PyTorch's losses are means over, items, a sum, what a loss is divided by. At each new
    size of parts, and a few times later, the loss of a whole batch and its gradient are compared with those of its
    parts, on copies, without a trace; the first way that gives the same holds.
    `may_probe` says whether the person's code may be called more often than a step does. Where `calls` knows its roots,
    calls are looked at first: nothing is compared where one changes what cannot be restored.
    """

    def __init__(
        self,
        split: Split = "auto",
        *,
        sums: bool = False,
        later: Sequence[int] = LATER,
        compiles: bool = False,
        on_ranks: bool = False,
    ) -> None:
        self.split = split
        self.may_probe: Callable[[], bool] = lambda: True
        self.calls = CallEffects(self._tell_of_effects)  # of the objectives
        self._default = SUM if sums else ITEMS
        self._sums, self._later, self._compiles, self._on_ranks = sums, later, compiles, on_ranks
        self._known: dict[str, _Known] = {}
        self._told: set[str] = set()

    def take_over(self, other: "Weighing") -> None:
        """Know what another has found out about the same objectives."""
        self.may_probe, self.calls = other.may_probe, other.calls
        self._known, self._told = other._known, other._told

    def items_in(self, batch: Any) -> int:
        """How many items a batch holds."""
        return items_in(batch) if isinstance(self.split, str) else items_along(batch, self.split)

    def parts_of(self, batch: Any, items: int, size: int) -> Iterator[tuple[Any, int, int | float | Tensor | None]]:
        """A batch in micro-batches of at most `size` items: each with its items, and its weight where that was said."""
        for start, stop in bounds(items, size):
            part, weight = part_of(batch, items, slice(start, stop), self.split)
            yield part, stop - start, weight

    def verdict(
        self,
        name: str,
        probe: "Callable[[], Probe]",
        batch: Any,
        items: int,
        size: int | None,
    ) -> Verdict:
        """How batches of this shape are weighed; `size`: they are cut into micro-batches, else they accumulate.

        `probe` is asked for where a comparison is due: of batches that accumulate before the pass of the second, since
        the first is looked at.
        """
        if self.split == "items":
            return self.known(name, batch)
        known, key = self._known.setdefault(name, _Known()), (shapes_in(batch), size)
        verdict = known.verdicts.get(key)
        alike = [each for (_, other), each in known.verdicts.items() if other == size]
        if (told := next((each for each in alike if each.differs is not None), None)) is not None and size is None:
            return told
        if size is None and not alike and (known.first is None or not self.calls.are_known):
            return Verdict()
        known.cuts += 1
        if (verdict is None and len(alike) < SHAPES) or known.cuts in self._later or 0 < known.open < UNDECIDED:
            verdict = self._compared(known, key, probe(), batch, items, size) or verdict
        return verdict or next(reversed(alike), Verdict())

    def known(self, name: str, batch: Any) -> Verdict:
        """What was found out about batches of this shape, or of others, without a comparison."""
        if self.split == "items":
            return Verdict(self._default)
        verdicts, shapes = self._known.setdefault(name, _Known()).verdicts, shapes_in(batch)
        alike = [verdict for (other, _), verdict in verdicts.items() if other == shapes]
        return (alike or [*verdicts.values()] or [Verdict()])[-1]

    def _compared(
        self, known: _Known, key: Any, probe: Probe, batch: Any, items: int, size: int | None
    ) -> Verdict | None:
        """The verdict of a comparison, which is kept; None where there can be none."""
        first, known.first = known.first, known.first and (None, *known.first[1:])  # no batch is held for longer
        if not self._may_be_called:
            return None
        given = [(batch, items, size)] if items > 1 else []
        joins = size is None and isinstance(self.split, str) and not (known.is_own and given)
        if joins and first is not None and first[0] is not None:  # as they accumulate
            before = int(first[1].count)
            both = joined(first[0], batch, before, items)
            given = [(both, before + items, max(before, items)), *given] if both is not None else given
        if not given:
            return None
        may_repeat = self.calls.before_call(probe.modules, is_extra=True)
        probe = replace(probe, learns=probe.learns and not known.is_own)
        found = [probe.compared(*each, self.split, may_repeat) for each in given]
        verdicts = [each.verdict(sums=self._sums) if isinstance(each, PartsComparison) else each for each in found]
        told = [each for each in verdicts if each is not None]
        verdict = next((each for each in told if each.differs is not None), told[0] if told else None)
        if verdict is not None:
            known.verdicts[key] = verdict
            known.open = known.open + 1 if verdict.is_open else 0
        return verdict

    def losses(
        self,
        verdict: Verdict,
        name: str,
        objective: Objective,
        plain: Objective,
        model: nn.Module,
        batch: Any,
        items: int,
        weight: int | float | Tensor | None = None,
        *,
        is_part: bool = False,
    ) -> Losses:
        """The losses of a batch or a part of one, and their weight; `plain` is `objective`, not compiled or watched."""
        way, known = GIVEN if weight is not None else verdict.way, self._known.get(name)
        if way is None and known is not None and known.own:
            way = known.own.get(shapes_in(batch))
        if way is not None and way.kind != "count":
            losses = losses_of(objective, model, batch, name, items)
        elif way is not None and way.is_of_classes:
            classes = ClassCounts()
            losses = uniform(watched(objective, model, batch, classes, whole=objective is not plain), batch, name)
            weight = classes.count
        else:
            if self._compiles and objective is not plain and way is not None:
                self._tell_of_eager()
            counts = Denominators()
            with self.looked_at(model) if way is None else _NOTHING, eager():
                losses = uniform(watched(plain, model, batch, counts), batch, name)
            way = way or self._unless_compared(name, losses, counts, batch, items, is_part=is_part)
            weight = counts.value_at(way.place)
        self._weigh(losses, way, items, weight, reads=is_part)
        known = self._known.get(name)
        if known is not None and known.first is not None and verdict.way is not None:
            _, before, noted = known.first
            known.first = None
            if self._on_ranks and verdict.way != known.guess:
                self._tell_of_first_step(verdict.way)
            elif verdict.way != known.guess:
                self._weigh(before, verdict.way, int(before.count), noted.value_at(verdict.way.place))
                losses.first = float(before.mass)
        return losses

    def _weigh(
        self, losses: Losses, way: PartWeight, items: int, weight: int | float | Tensor | None, *, reads: bool = False
    ) -> None:
        """Note what losses weigh; `reads`: the host is to know where nothing counts: a gradient may be 0/0 there."""
        if losses.is_counted and way is not GIVEN:
            return
        losses.count, losses.is_counted = items, False
        if way.kind == "sum":
            losses.is_sum = True
        elif way.kind == "items":
            losses.weight = items * way.ratio
        elif way.kind != "own":
            weight = 0.0 if weight is None else weight  # where the objective returned before it came to the count
            if (
                isinstance(weight, Tensor)
                and not is_capturing()
                and (weight.is_cpu or (reads and not way.is_of_classes))
            ):
                weight = float(weight)
            losses.weight, losses.size, losses.by_values = weight, max(items, round(items * way.ratio)), True
            if not isinstance(weight, Tensor) and not (weight or way.drops) and losses.total.detach().item():
                self.tell_of_what_is_left_out()

    def _unless_compared(
        self, name: str, losses: Losses, counts: Denominators, batch: Any, items: int, *, is_part: bool
    ) -> PartWeight:
        """The way of losses that were not compared."""
        if losses.is_counted:
            return OWN
        ways = {way_of_pytorch(counts, value, items) for value in losses.parts.values()}
        own = ways.pop() if len(ways) == 1 else None
        known = self._known.setdefault(name, _Known())
        if own is not None:
            known.own[shapes_in(batch)] = own
        if known.first is None and not is_part:  # a comparison is still to come
            counts.forget()
            before = Losses({"": losses.total.detach()}, items)
            known.first, known.is_own = (batch, before, counts), own is not None
            places = [place for place, count in enumerate(counts.counts) if count.by_values] if self._on_ranks else []
            known.guess = own or (PartWeight("count", places[-1]) if places else self._default)
            return known.guess
        elif own is None and not is_capturing():
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
            return {name: way or OWN for name, way in own.items()}
        found = None
        if items > 1 and probe is not None and self._may_be_called:
            found = probe.compared(batch, items, None, self.split)
        if isinstance(found, PartsComparison):
            verdicts = {name: found.verdict(name, sums=self._sums) for name in own}
            if not last and any(each.is_open and not found.whole.losses[name] for name, each in verdicts.items()):
                return None
            return {name: each.way or ITEMS for name, each in verdicts.items()}
        if last:
            return last
        if items == 1:
            return None
        self._tell_of_unknown(counts, items)
        return {name: way or self._default for name, way in own.items()}

    def default_ways(self, losses: Losses, counts: Denominators, items: int) -> Mapping[str, PartWeight]:
        """The ways of losses that nothing has told."""
        self._tell_of_unknown(counts, items)
        return dict.fromkeys(losses.parts, self._default)

    def looked_at(self, model: nn.Module) -> AbstractContextManager[None]:
        """Look at a call of the person's code, after which it may be known what it changes in Python."""
        return _NOTHING if is_capturing() else self.calls.looked_at([model])

    @property
    def _may_be_called(self) -> bool:
        return not self.calls.names and self.may_probe() and not is_capturing()

    def _tell_of_effects(self, names: list[str]) -> None:
        self._tell(
            "effects",
            f"your code changes {shorten(names, 3)} in each call, and was called once more than the step does, to"
            " compare the loss of the whole batch with that of its micro-batches",
        )

    def _tell_of_unknown(self, counts: Denominators, items: int) -> None:
        if items == 1 and not any(count.by_values for count in counts.counts):
            return  # whatever it is the mean over, or a sum, it weighs the same
        names = self.calls.names
        because = f", because your code changes what cannot be restored ({shorten(names, 3)})" if names else ""
        self._tell(
            "unknown",
            "what the loss is the mean over is not known, and it could not be compared with that of the whole batch"
            f"{because}: parts are weighed by items. fix: {_HOW_TO_SAY}",
        )

    def tell_of_what_is_left_out(self) -> None:
        """Say once that a loss counts for nothing, since the targets that it is the mean over do not."""
        self._tell(
            "empty",
            f"a batch, or a part of one, has a loss though nothing in it counts, and is left out. fix: {_HOW_TO_SAY}",
        )

    def _tell_of_first_step(self, way: PartWeight) -> None:
        self._tell(
            "first",
            f"the batches of ranks are {way}, as a comparison has shown, and those of the first step were weighed in"
            " another way. fix: return (loss, weight) from an objective, weight being what the loss is the mean over",
        )

    def _tell_of_eager(self) -> None:
        self._tell(
            "eager",
            "what the loss is the mean over is counted by the objective itself, which compiled code does not show: it"
            " runs eagerly in micro-batches and in accumulation. fix: return (loss, weight) from the objective",
        )

    def tell_of_difference(self, differs: str) -> None:
        """Say once that what accumulates is the mean of the batches' losses, and not the loss of them all."""
        self._tell(
            "differs",
            f"{differs}: accumulate averages the losses of its batches, which is not the loss of all of them together."
            f" fix: {_HOW_TO_SAY}",
        )

    def tell_of_norms(self, model: nn.Module, what: str) -> None:
        """Say once that batch normalisation sees less than the whole batch."""
        if "norms" in self._told or self.split == "items":
            return
        self._told.add("norms")
        if names := norms_in(model):
            words = f"batch normalisation ({shorten(names, 2)}) sees each {what} by itself"
            warnings.warn(
                f"{words}, so that what it learns depends on their size. fix: put those layers in eval mode, or use"
                " GroupNorm or LayerNorm",
                PlanWarning,
                stacklevel=2,
            )

    def _tell(self, key: str, words: str) -> None:
        if key not in self._told:
            self._told.add(key)
            warnings.warn(words, PlanWarning, stacklevel=2)


def norms_in(model: nn.Module) -> list[str]:
    """Names of the layers that normalise by the batch that they see."""
    return [name or type(m).__name__ for name, m in model.named_modules() if isinstance(m, BatchNorm) and m.training]


def check_cut(parameters: Sequence[nn.Parameter], split: Split, differs: str | None, *, asked: int | None) -> None:
    """Refuse micro-batches that would be another training; `asked`: their size, where the person gave it."""
    error: type[HotloopError] = DoesNotFit if asked is None else BadArgument
    begin = "memory ran out, and" if asked is None else f"micro_batch={asked}, and"
    if split == "off":
        raise error(
            "a batch does not fit into the memory, and the plan says that it must not be cut",
            fix='use a smaller batch, bf16 or activation checkpointing; or let it be cut: split="auto"',
        )
    if split == "items":
        return
    if any(accumulated_hooks(parameter) for parameter in parameters):
        raise error(
            f"{begin} parameters have hooks that run when their gradient is there, such as an optimizer that steps in"
            " the backward pass: in micro-batches they would run several times for one batch",
            fix='use a smaller batch, or step after the backward pass; where the hooks do no harm: split="items"',
        )
    if differs is not None:
        raise error(f"{begin} {differs}", fix=_HOW_TO_SAY)
