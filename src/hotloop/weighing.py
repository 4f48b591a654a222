"""`Weighing`: what micro-batches weigh beside one another, read from the loss and compared with the whole batch."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose, isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import BUFFERS, MODULES, PARAMETERS, BatchNorm, DispatchMode, accumulated_hooks, schema_of
from hotloop.effects import Skip, installed_once, look
from hotloop.errors import BadArgument, DoesNotFit, HotloopError, PlanWarning
from hotloop.memory.micro_batches import bounds, items_along, part_of
from hotloop.memory.oom import clear, is_capturing, is_out_of_memory
from hotloop.objective import Losses, Objective, items_in, logits_of, losses_of, predict, shapes_in, uniform
from hotloop.placement import map_tensors
from hotloop.plan import Split
from hotloop.reductions import Classes, Reduction, ReductionMode, eager, total_of
from hotloop.rng import Generator, draw, host_rngs, same_state
from hotloop.snapshot import PassSnapshot
from hotloop.text import shorten

LATER = (8, 64)  # cuts that are compared again, whatever their shape
UNDECIDED = 3  # comparisons in a row in which any weights would do
SHAPES = 8  # of batches whose first cut is compared; later ones are like them
EXACT = 5e-5  # relative difference that rounding in fp32 explains
TF32 = 2e-3  # the same for matmuls of rounded inputs
HALVED = 2e-2  # the same for numbers of half the precision
DRAWS = 3  # passes that tell how much a loss depends on chance
_HALF = (torch.bfloat16, torch.float16)
_NOTHING = nullcontext()
_HOW_TO_SAY = (
    "return (loss, weight) from an objective, weight being what the loss is the mean over; or say how a batch is cut:"
    " split=1 where time comes first, split=function with (batch, start, stop) → part or (part, weight); or accept what"
    ' differs with split="items"'
)
Seen = Literal["nothing", "classes", "everything"]


@dataclass(frozen=True, slots=True)
class MicroBatchWeight:
    """How the loss of a micro-batch is weighed, and what has to be watched for that."""

    kind: Literal["mean", "sum", "own"]
    watch: Seen = "nothing"
    ratio: float = 1.0  # of the weight to the items, where shapes decide it


ITEMS, SUM, OWN = MicroBatchWeight("mean"), MicroBatchWeight("sum"), MicroBatchWeight("own")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about batches of a shape."""

    way: MicroBatchWeight | None = None  # None: read it from each loss
    differs: str | None = None  # how the micro-batches differ from the whole batch, in words


@dataclass(slots=True)
class _Known:
    """What was found out about the batches of one objective."""

    verdicts: dict[Any, Verdict] = field(default_factory=dict)
    cuts: int = 0
    read: dict[Any, MicroBatchWeight] = field(default_factory=dict)  # of shapes that were not compared
    undecided: int = 0  # comparisons in a row in which all micro-batches had about the same loss


class Weighing:
    """How the losses of micro-batches, or of the batches of an accumulation window, make up that of the whole.

    What a loss is the mean over is read while it is computed. At the first cut of each shape, and at a few later ones,
    the loss of the whole batch is compared with that of its micro-batches, on copies, without a trace.
    `may_probe` says whether the person's code may be called more often than a step does. With `roots`, from where that
    code can be reached, it is looked at first: nothing is compared where a call changes what cannot be restored.
    """

    def __init__(
        self, split: Split = "auto", *, sums: bool = False, later: Sequence[int] = LATER, compiles: bool = False
    ) -> None:
        self.split = split
        self.may_probe: Callable[[], bool] = lambda: True
        self.roots: Callable[[], Mapping[str, object]] | None = None
        self._effects: list[str] | None = None  # what each call of the objectives changes; None: not known yet
        self._first: list[str] = []  # what the first call changed, which may be done once, as by one that fills a cache
        self._called_once_more = False  # that call was no step's
        self._sums, self._later, self._compiles = sums, later, compiles
        self._known: dict[str, _Known] = {}
        self._told: set[str] = set()

    def take_over(self, other: "Weighing") -> None:
        """Know what another has found out about the same objectives."""
        self.may_probe, self.roots, self._effects = other.may_probe, other.roots, other._effects
        self._first, self._called_once_more = other._first, other._called_once_more
        self._known, self._told = other._known, other._told

    def items_in(self, batch: Any) -> int:
        """How many items a batch holds."""
        return items_in(batch) if isinstance(self.split, str) else items_along(batch, self.split)

    def parts_of(self, batch: Any, items: int, size: int) -> Iterator[tuple[Any, int, int | float | Tensor | None]]:
        """A batch in micro-batches of at most `size` items: each with its items, and its weight where that was said."""
        for start, stop in bounds(items, size):
            part, weight = part_of(batch, items, slice(start, stop), self.split)
            yield part, stop - start, weight

    def verdict(self, name: str, probe: "Callable[[], Probe]", batch: Any, items: int, size: int | None) -> Verdict:
        """How batches of this shape are weighed; `size`: they are cut into micro-batches, else they accumulate.

        `probe` is asked for where a comparison is due.
        """
        if self.split == "items":
            return Verdict(SUM if self._sums else ITEMS)
        known = self._known.setdefault(name, _Known())
        shape = shapes_in(batch)
        verdict = known.verdicts.get(shape)
        if size is None and self.roots is not None and self._effects is None:
            return Verdict()  # the real pass is looked at, and the next batch compared
        known.cuts += 1
        is_new = verdict is None and len(known.verdicts) < SHAPES
        if is_new or known.cuts in self._later or 0 < known.undecided < UNDECIDED:
            found = self._found(known, probe(), batch, items, size)
            verdict = known.verdicts[shape] = found or verdict or Verdict()
        elif verdict is None:  # like the others
            verdict = next(reversed(known.verdicts.values()), Verdict())
        return verdict

    def known(self, name: str, batch: Any) -> Verdict:
        """What was found out about batches of this shape, without a comparison."""
        if self.split == "items":
            return Verdict(SUM if self._sums else ITEMS)
        known = self._known.setdefault(name, _Known())
        verdict = known.verdicts.get(shapes_in(batch))
        return verdict or next(reversed(known.verdicts.values()), Verdict())

    def _found(self, known: _Known, probe: "Probe", batch: Any, items: int, size: int | None) -> Verdict | None:
        """The verdict of a comparison; None where there can be none."""
        if items < 2 or not self._may_be_called() or is_capturing():
            return None
        looked = self._looking(probe.modules)
        self._called_once_more |= looked is not None
        parts = max(items // 3, min(2, items - 1)) if size is None else size
        comparison = probe.compared(batch, items, parts, self.split, partial(self._settle, looked))
        if comparison is None:
            return None
        verdict = comparison.verdict(sums=self._sums)
        known.undecided = known.undecided + 1 if comparison.is_undecided and verdict.differs is None else 0
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
    ) -> Losses:
        """The losses of a micro-batch with what they weigh; `objective` may be compiled or watched, `plain` is not."""
        with self._looked_at(model) if verdict.way is None else _NOTHING:
            way = verdict.way
            if way is None and (known := self._known.get(name)) is not None and known.read:
                way = known.read.get(shapes_in(batch))
            seen: Seen = "everything" if way is None else way.watch
            if weight is not None or seen == "nothing":
                losses = losses_of(objective, model, batch, name, items)
                reading = None
            elif seen == "classes":
                counted = Classes()
                returned = watched(objective, model, batch, counted, whole=objective is not plain)
                losses = uniform(returned, batch, name)
                count, reading = counted.count, None
                if count is not None and not losses.is_counted:
                    losses.weight, losses.size = count, max(items, round(items * (way.ratio if way else 1)))
            else:
                if self._compiles and objective is not plain and way is not None:
                    self._tell_of_eager()
                losses, reading = self._read(name, plain, model, batch, items)
                if way is None:
                    self._learn(name, batch, items, losses, reading)
            if losses.is_counted and weight is None:
                return losses
            losses.count, losses.is_counted = items, False
            if weight is not None:
                losses.weight, losses.size, losses.by_values = weight, items, True
            elif way is not None and way.kind == "sum":
                losses.is_sum = True
            elif way is not None and seen == "nothing":
                losses.weight = items * way.ratio
            elif reading is not None:
                self._weigh(losses, reading, way)
            return losses

    @contextmanager
    def _looked_at(self, model: nn.Module) -> Iterator[None]:
        """A call of the person's code, after which it is known what it changes in Python."""
        looked = self._looking([model])
        try:
            yield
        finally:
            self._settle(looked)

    def _looking(self, modules: Sequence[nn.Module]) -> Callable[[], list[str]] | None:
        """Look at the Python state that a call may change; what is returned tells what has, by name."""
        if self.roots is None or self._effects is not None or is_capturing():
            return None
        roots, skip = self.roots(), _restored(modules)
        weights = [parameter for module in modules for parameter in module.parameters()]
        before = look(roots, skip, weights)
        return lambda: before.changes(look(roots, skip, weights))

    def _settle(self, looked: Callable[[], list[str]] | None) -> bool:
        """After a call that was looked at; whether the code may be called again."""
        if looked is not None and self._effects is None:
            changed = looked()
            if changed and not self._first:
                self._first = changed
                return False
            self._effects = changed
            if changed and self._called_once_more:
                self._tell(
                    "effects",
                    f"your code changes {shorten(changed, 3)} in each call, and was called once more than the step"
                    " does, to compare the loss of the whole batch with that of its micro-batches",
                )
        return not self._effects

    def _may_be_called(self) -> bool:
        return not self._effects and self.may_probe()

    def _read(
        self, name: str, objective: Objective, model: nn.Module, batch: Any, items: int
    ) -> tuple[Losses, Reduction]:
        watch = ReductionMode(items, guards=True)
        try:
            with eager():
                losses = uniform(watched(objective, model, batch, watch), batch, name)
            return losses, total_of(map(watch.of, losses.parts.values()))
        finally:
            watch.forget()

    def _learn(self, name: str, batch: Any, items: int, losses: Losses, reading: Reduction) -> None:
        """Know how a loss is made that could not be compared, so that less has to be watched the next time."""
        if losses.is_counted:
            way: MicroBatchWeight | None = OWN
        elif reading.kind == "sum":
            way = SUM
        elif reading.kind == "mean" and (reading.classes or not reading.by_values):
            way = MicroBatchWeight("mean", "classes" if reading.classes else "nothing", reading.size / max(items, 1))
        else:
            way = None
        if way is not None:
            self._known.setdefault(name, _Known()).read[shapes_in(batch)] = way

    def _weigh(self, losses: Losses, reading: Reduction, way: MicroBatchWeight | None) -> None:
        """Weigh a loss by what was read of it."""
        if reading.kind == "mean":
            losses.weight, losses.size, losses.by_values = reading.count, reading.size, reading.by_values
        elif way is None and reading.kind == "sum":
            losses.is_sum = True
        elif way is None and reading.kind == "unknown" and not self._may_be_called():
            names = f" ({shorten(self._effects, 3)})" if self._effects else ""
            self._tell(
                "unknown",
                "what the loss is the mean over is not known, and it cannot be compared with that of the whole batch,"
                f" because your code changes what cannot be restored{names}: micro-batches are weighed by items."
                f" fix: {_HOW_TO_SAY}",
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


def _restored(modules: Sequence[nn.Module]) -> Skip:
    """What a `PassSnapshot` restores of modules: buffers, numbers, tensors, containers and generators."""
    known = {id(inner) for module in modules for inner in module.modules()}
    kinds = (int, float, complex, str, bytes, type(None), tuple, list, dict, set, deque, Tensor, Generator)

    def skip(owner: object, name: str, value: object) -> bool:
        if isinstance(owner, Optimizer):
            return name != "param_groups"  # no call of an objective steps it, but one may change its rates
        inner = id(owner) in known and name != MODULES
        return inner and (name in (PARAMETERS, BUFFERS) or isinstance(value, kinds) or installed_once(name, value))

    return skip


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


def watched(objective: Objective, model: nn.Module, batch: Any, mode: Any, *, whole: bool = False) -> Any:
    """What an objective returns, its loss computed inside a mode: of a criterion the loss alone, unless `whole`."""
    criterion = None if whole else getattr(objective, "criterion", None)
    if criterion is None:
        with mode:
            return objective(model, batch)
    if type(batch) in (list, tuple) and len(batch) == 2:  # most batches
        output, target = model(batch[0]), batch[1]
    else:
        output, target = predict(model, batch)
    with mode:
        return criterion(logits_of(output), target)


@dataclass(frozen=True, slots=True)
class _Loss:
    value: float
    items: int
    reading: Reduction
    weight: float | None = None  # that the person's own cut gave
    is_counted: bool = False
    rounding: float = EXACT  # relative difference that the precision explains
    draws: bool = False  # whether numbers were drawn from Python or NumPy, which no constants stand for


@dataclass(frozen=True, slots=True)
class LossComparison:
    """The loss of a batch beside those of its micro-batches."""

    whole: _Loss
    parts: tuple[_Loss, ...]
    error: str | None = None  # what the micro-batches raised, and the whole did not
    chance: float = 0.0  # difference that other draws from Python or NumPy explain

    @property
    def is_undecided(self) -> bool:
        """Whether all micro-batches have about the same loss, as with a head that begins with zeros: any weights do."""
        return all(isclose(part.value, self.parts[0].value, rel_tol=1e-2, abs_tol=1e-9) for part in self.parts)

    def verdict(self, *, sums: bool) -> Verdict:
        """The first way that gives the loss of the whole batch."""
        if self.whole.is_counted:
            return Verdict(OWN)
        if self.error is not None:
            return Verdict(
                ITEMS, f"the loss could not be computed in micro-batches of {self.parts_items()}: {self.error}"
            )
        if self.parts[0].weight is not None:
            ways = [("as your function weighs them", ITEMS, self._mean([p.weight or 0.0 for p in self.parts]))]
        else:
            by_items = ("weighed by items", ITEMS, self._mean([float(part.items) for part in self.parts]))
            summed = ("added up", SUM, self._sum())
            ways = [*self._read(), by_items, summed]
            ways = [summed, *ways] if sums else ways
        if all(part.reading.kind == "mean" and not part.reading.count for part in self.parts):
            return Verdict(ways[0][1])  # every target is ignored: there is nothing to compare
        for _, way, (value, scale) in ways:
            rounding = self._tolerance * max(scale, abs(self.whole.value))
            if abs(value - self.whole.value) <= rounding + self.chance + 1e-7:
                return Verdict(way)
        how, way, (value, _) = ways[0]
        return Verdict(
            way,
            f"the loss is not that of its micro-batches: {self.whole.value:.6g} for {self.whole.items} items at once,"
            f" {value:.6g} in micro-batches of {self.parts_items()}, {how}; it couples the samples of a batch, or"
            " averages over something else, or the batch is not cut along its items",
        )

    def parts_items(self) -> str:
        sizes = list(dict.fromkeys(str(part.items) for part in self.parts))
        return " and ".join(sizes[:2]) or "fewer items"

    @property
    def _tolerance(self) -> float:
        return max(each.rounding for each in (self.whole, *self.parts))

    def _read(self) -> list[tuple[str, MicroBatchWeight, tuple[float, float]]]:
        """What the reading says, where it says the same of all micro-batches."""
        readings = [part.reading for part in self.parts]
        if all(reading.kind == "sum" for reading in readings):
            return [("added up", SUM, self._sum())]
        if not all(reading.kind == "mean" for reading in readings):
            return []
        counts = [float(reading.count) for reading in readings]
        ratio = readings[0].size / self.parts[0].items
        if not any(reading.by_values for reading in readings):
            alike = all(isclose(r.size / p.items, ratio) for r, p in zip(readings, self.parts, strict=True))
            way = MicroBatchWeight("mean", "nothing", ratio) if alike else MicroBatchWeight("mean", "everything")
        else:
            way = MicroBatchWeight(
                "mean", "classes" if all(reading.classes for reading in readings) else "everything", ratio
            )
        return [("weighed by what they are means over", way, self._mean(counts))]

    def _mean(self, weights: list[float]) -> tuple[float, float]:
        """The mean of the losses by these weights, and how large they are."""
        total = sum(weights)
        if not total:
            return float("nan"), 0.0
        pairs = [(weight, part.value) for weight, part in zip(weights, self.parts, strict=True) if weight]
        return sum(w * v for w, v in pairs) / total, sum(w * abs(v) for w, v in pairs) / total

    def _sum(self) -> tuple[float, float]:
        return sum(part.value for part in self.parts), sum(abs(part.value) for part in self.parts)


@dataclass(frozen=True)
class Probe:
    """Compares the loss of a batch with those of its micro-batches and leaves no trace.

    In fp32, without dropout, with constants for random numbers, with batch normalisation in eval mode. The whole batch
    is computed under `no_grad`, which needs far less memory; where even that does not fit, a part of it.
    """

    objective: Objective
    model: nn.Module
    modules: Sequence[nn.Module]
    device: torch.device
    autocast: Any = None  # for models that do not run without
    learns: bool = True  # gradients are wanted too: what a loss is divided by must not have one

    def compared(
        self, batch: Any, items: int, size: int, split: Split, may_go_on: Callable[[], bool] = lambda: True
    ) -> LossComparison | None:
        """The comparison; None where it does not fit, or where the whole batch has no finite loss.

        `may_go_on` is asked after the first call of the person's code, whose every trace should be gone then.
        """
        for context in (None, self.autocast) if self.autocast is not None else (None,):
            rows, least = items, size
            while rows >= 2:
                try:
                    part = _fresh(batch if rows == items else part_of(_fresh(batch), items, slice(0, rows), split)[0])
                    return self._compared(part, rows, min(least, max(rows // 2, 1)), split, context, may_go_on)
                except _Useless:
                    break
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                clear(self.device)
                rows, least = rows // 2, max(least // 2, 1)
        return None

    def _compared(
        self, batch: Any, items: int, size: int, split: Split, context: Any, may_go_on: Callable[[], bool]
    ) -> LossComparison:
        try:
            whole = self._loss(_fresh(batch), items, context, grad=False, watches=True)
            if not may_go_on():
                raise _Useless
        except (HotloopError, torch.AcceleratorError, _Useless):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise _Useless from error  # the step itself will say it
        if whole.is_counted or not isfinite(whole.value):
            if not whole.is_counted:
                raise _Useless
            return LossComparison(whole, (whole,))
        parts: list[_Loss] = []
        given = _fresh(batch)
        try:
            for start, stop in bounds(items, size) if size > 1 or items <= 8 else ((0, 1), (1, items)):
                part, weight = part_of(given, items, slice(start, stop), split)
                loss = self._loss(part, stop - start, context, grad=self.learns)
                parts.append(replace(loss, weight=None if weight is None else float(weight)))
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            said = (str(error).strip().splitlines() or [""])[0]
            return LossComparison(whole, tuple(parts), f"{type(error).__name__}: {said}")
        return LossComparison(whole, tuple(parts), chance=self._chance(batch, whole, context) if whole.draws else 0.0)

    def _chance(self, batch: Any, whole: _Loss, context: Any) -> float:
        """By how much the loss differs between draws: masks of parts are others than those of the whole batch."""
        counts = [1000 * n for n in range(1, DRAWS + 1)]  # after a few, NumPy's permutations are often the same
        others = [self._loss(_fresh(batch), whole.items, context, grad=False, drawn=count) for count in counts]
        return 3 * max(abs(other.value - whole.value) for other in others)

    def _loss(
        self, batch: Any, items: int, context: Any, *, grad: bool, drawn: int = 0, watches: bool = False
    ) -> _Loss:
        """The loss of a batch, after so many numbers were `drawn` from Python and NumPy; `watches` if it draws any."""
        before = PassSnapshot(self.modules, self.device)
        before.take()
        draw(drawn)
        states = _host_states() if watches else {}
        settled, watch = _Settled(), ReductionMode(items, guards=True)
        off = torch.autocast(self.device.type, enabled=False) if context is None else context
        try:
            with warnings.catch_warnings(), torch.set_grad_enabled(grad), off, eager(), _in_eval(self.modules):
                warnings.simplefilter("ignore")  # the step itself says it
                with settled:
                    losses = uniform(watched(self.objective, self.model, batch, watch), batch)
                reading = total_of(map(watch.of, losses.parts.values()))
                value = float(losses.total.detach().double().item())
                if isinstance(reading.count, Tensor):
                    reading = replace(reading, count=float(reading.count.detach().double().item()), bare=None)
            tf32 = _tf32(self.device) or (settled.convolves and self.device.type == "cuda")
            rounding = HALVED if settled.rounds else TF32 if tf32 else EXACT
            draws = watches and not same_state(states, _host_states())
            return _Loss(value, items, reading, None, losses.is_counted, rounding, draws)
        finally:
            watch.forget()
            before.restore()


def _host_states() -> dict[str, Any]:
    """The states of the generators of Python and NumPy."""
    return {name: rng.get_state() for name, rng in host_rngs().items() if name != "torch"}


class _Useless(Exception):
    """The whole batch has no loss to compare with."""


class _Settled(DispatchMode):
    """Random operations give constants, whatever the shape of a batch; dropout is off."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = False  # whether something was computed in half the precision
        self.convolves = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return _settled(func, args, kwargs)
        result = func(*args, **kwargs)
        if type(result) is Tensor and result.dtype in _HALF:
            self.rounds = True
        if func is torch.ops.aten.convolution.default:
            self.convolves = True
        return result


_CONSTANTS = {"bernoulli": 1.0, "exponential": 1.0, "geometric": 1.0, "randint": 0.0, "random": 0.0, "multinomial": 0.0}


def _settled(func: Any, args: Any, kwargs: Any) -> Any:
    """A random operation without chance in it."""
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
    kind = name.strip("_").partition("_like")[0]
    if kind in ("native_dropout", "fused_dropout"):
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool if kind == "native_dropout" else torch.uint8)
    if "dropout" in kind:
        return args[0].clone()
    args, kwargs = _without_dropout(func, args, kwargs)
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor) or kind.startswith("rrelu"):
        return result
    if kind == "randperm":
        return result.copy_(torch.arange(result.numel(), device=result.device))
    return result.fill_(_CONSTANTS.get(kind, 0.5 if result.is_floating_point() else 0))


def _without_dropout(func: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation that drops out beside what it does, as attention and recurrent layers do."""
    given = list(args)
    for number, argument in enumerate(schema_of(func).arguments):
        if argument.name in ("dropout_p", "dropout"):
            if number < len(given):
                given[number] = 0.0
            elif argument.name in kwargs:
                kwargs = {**kwargs, argument.name: 0.0}
    return tuple(given), kwargs


@contextmanager
def _in_eval(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Batch normalisation by what it has learnt, not by the batch."""
    norms = {m for module in modules for m in module.modules() if isinstance(m, BatchNorm) and m.training}
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def _tf32(device: torch.device) -> bool:
    """Whether matmuls may round their inputs to 10 bits of mantissa."""
    if device.type != "cuda":
        return False
    with suppress(RuntimeError):  # the person has set precisions by the newer names: then the older cannot be read
        return torch.get_float32_matmul_precision() != "highest"
    return True


def _fresh(batch: Any) -> Any:
    """A batch with tensors and containers of its own."""

    def own(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    if isinstance(batch, Tensor):
        return own(batch)
    return map_tensors(batch, own)
