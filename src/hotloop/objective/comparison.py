"""`Probe`: compares the loss of a batch and its gradient with those of its parts, and finds how the parts weigh."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import isclose, isfinite, isnan
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hotloop._torch import BatchNorm, DispatchMode, gradient_hooks, schema_of
from hotloop.device.backend import backend_of
from hotloop.errors import HotloopError
from hotloop.memory.micro_batches import bounds, part_of
from hotloop.memory.oom import clear, is_out_of_memory
from hotloop.objective.objectives import Losses, Objective, logits_of, losses_of, predict, uniform
from hotloop.objective.reductions import ClassCounts, Denominators, eager
from hotloop.plan import Split
from hotloop.printing.text import error_in_a_line
from hotloop.values.rng import draw, host_rngs, same_state
from hotloop.values.snapshot import PassSnapshot
from hotloop.values.tree import map_tensors

EXACT = 5e-5  # relative difference that rounding in fp32 explains
TF32 = 2e-3  # the same for matmuls of rounded inputs
HALVED = 2e-2  # the same for numbers of half the precision
DRAWS = 3  # passes that tell how much a loss depends on chance
TOTAL = ""  # the name of the sum of all losses
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PartWeight:
    """How the losses of parts make up that of the whole.

    `items`: their mean by items; `sum`; `given`: by the weights that the function gives which cuts a batch; `count`: by
    one of the counts that are noted in each pass. A count that the objective returns goes before all of them.
    """

    kind: Literal["items", "sum", "given", "count"]
    place: int = 0  # of the count among those of a pass
    is_of_classes: bool = False  # whether it is the only count, and of a loss over classes
    ratio: float = field(default=1.0, compare=False)  # of the weight to the items, as far as it is known
    drops: bool = field(default=False, compare=False)  # whether what weighs nothing was seen to have a loss

    def __str__(self) -> str:
        words = {"items": "weighed by items", "sum": "added up", "given": "as your function weighs them"}
        return words.get(self.kind, "weighed by what they are means over")

    def counter(self) -> Denominators | ClassCounts | None:
        """Notes in a pass what losses of this weight are counted by; None where nothing need be noted."""
        if self.kind != "count":
            return None
        return ClassCounts() if self.is_of_classes else Denominators()


ITEMS, SUM, GIVEN = PartWeight("items"), PartWeight("sum"), PartWeight("given")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about batches of a shape, cut in parts of a size."""

    way: PartWeight | None = None  # None: not compared
    differs: str | None = None  # how the parts differ from the whole batch, in words
    is_open: bool = False  # whether other ways would have done as well


def way_of_pytorch(counts: Denominators, loss: Tensor, items: int) -> PartWeight | None:
    """The way of a loss that is a mean of PyTorch's; None for any other."""
    place = counts.place_of(loss)
    if place is None:
        return None
    count, items = counts.counts[place], max(items, 1)
    if not count.by_values:
        return PartWeight("items", ratio=float(count.value) / items)
    return PartWeight("count", place, bool(count.size) and len(counts.counts) == 1, (count.size or items) / items)


def observed(
    objective: Objective,
    plain: Objective,
    model: nn.Module,
    batch: Any,
    counts: Denominators | ClassCounts | None,
    name: str = "loss",
    items: int | None = None,
) -> Losses:
    """The losses of a batch, while `counts` are noted.

    `plain` is `objective`, not compiled or watched: the compiler traces no other counts than those of classes.
    """
    if counts is None:
        return losses_of(objective, model, batch, name, items)
    of_classes = isinstance(counts, ClassCounts)
    called = objective if of_classes else plain
    criterion = None if called is not plain else getattr(plain, "criterion", None)
    with nullcontext() if of_classes else eager():
        if criterion is None:
            with counts:
                returned = called(model, batch)
        else:  # of which the loss alone is watched
            if type(batch) in (list, tuple) and len(batch) == 2:  # most batches
                output, target = model(batch[0]), batch[1]
            else:
                output, target = predict(model, batch)
            with counts:
                returned = criterion(logits_of(output), target)
    return uniform(returned, batch, name, items)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one pass of a comparison showed."""

    losses: Mapping[str, float]
    items: int
    counts: Sequence[tuple[float, bool, bool]]  # each with whether values decide it, and whether it counts classes
    own: Mapping[str, PartWeight | None]  # the ways of losses that are PyTorch's
    is_counted: bool
    rounding: float  # relative difference that the precision explains
    slopes: Tensor | None = None  # the gradient of each parameter along a fixed direction
    draws: bool = False  # whether numbers were drawn from Python or NumPy, which no constants stand for
    weight: float | None = None  # that the person's own cut gave

    def weighed(self, way: PartWeight) -> float:
        """What this part weighs; nan where it returned before it came to the count."""
        if way.kind == "count":
            return self.counts[way.place][0] if way.place < len(self.counts) else float("nan")
        return {"given": self.weight or 0.0, "sum": 1.0}.get(way.kind, float(self.items))


@dataclass(frozen=True, slots=True)
class PartsComparison:
    """The losses and the gradient of a batch beside those of its parts."""

    whole: _Pass
    parts: Sequence[_Pass]
    chance: float = 0.0  # difference that other draws from Python or NumPy explain
    within: "PartsComparison | None" = None  # a first part with its gradient, beside its own parts

    def verdict(self, name: str = TOTAL, *, sums: bool) -> Verdict:
        """The first way that gives the loss and the gradient of the whole."""
        if any(isnan(count) for count, *_ in self.whole.counts):
            return Verdict(ITEMS, "the loss is divided by a count that is kept above a number which parts do not reach")
        ways = self._ways(name, sums=sums)
        by_loss = [way for way in ways if self._fits(name, way)]
        fitting = [
            way for way in by_loss if self._fits_gradient(way) and not (self.within and self.within._strays(name, way))
        ]
        if not fitting:
            return Verdict(SUM if sums else ITEMS, self._difference(name, (by_loss or ways)[0], is_equal=bool(by_loss)))
        values = [part.losses[name] for part in self.parts]
        even = all(isclose(value, values[0], rel_tol=1e-2, abs_tol=1e-9) for value in values)
        likely = [w for w in fitting if w.kind != "count" or self.whole.counts[w.place][1]]
        is_open = fitting[0] != self.whole.own.get(name) and (even or len(likely) > 1)
        drops = any(part.losses[name] and not part.weighed(fitting[0]) for part in self.parts)
        return Verdict(replace(fitting[0], drops=drops), is_open=is_open)

    def _ways(self, name: str, *, sums: bool) -> list[PartWeight]:
        """The likely ways, the likeliest first."""
        if self.parts[0].weight is not None:
            return [GIVEN]
        whole, number = self.whole, len(self.whole.counts)
        if not all(len(part.counts) == number or not part.losses[name] for part in self.parts):
            return [SUM, ITEMS] if sums else [ITEMS, SUM]
        ways = [
            PartWeight("count", n, of_classes and number == 1, c / whole.items)
            for n, (c, _, of_classes) in enumerate(whole.counts)
        ]
        by_values, others = ([w for w in ways[::-1] if whole.counts[w.place][1] is wanted] for wanted in (True, False))
        own = whole.own.get(name)
        return [*([own] if own else []), *([SUM] if sums else []), *by_values, ITEMS, SUM, *others]

    def _weights(self, way: PartWeight) -> tuple[list[float], float]:
        """What the parts weigh, and what the sum is divided by."""
        weights = [part.weighed(way) for part in self.parts]
        weights = [
            0.0 if isnan(w) and not part.losses[TOTAL] else w for w, part in zip(weights, self.parts, strict=True)
        ]
        return weights, 1.0 if way.kind == "sum" else sum(weights)

    def _fits(self, name: str, way: PartWeight) -> bool:
        weights, total = self._weights(way)
        if not total:
            return True  # nothing counts, and there is nothing to compare
        whole, values = self.whole.losses[name], [p.losses[name] * w for p, w in zip(self.parts, weights, strict=True)]
        scale = max(sum(map(abs, values)) / abs(total), abs(whole))
        return abs(sum(values) / total - whole) <= self._rounding * scale + self.chance + 1e-7

    def _fits_gradient(self, way: PartWeight) -> bool:
        weights, total = self._weights(way)
        pairs = [(part.slopes, w / total) for part, w in zip(self.parts, weights, strict=True) if total and w]
        slopes = [slopes * weight for slopes, weight in pairs if slopes is not None]
        if self.whole.slopes is None or not pairs or len(slopes) < len(pairs) or self.chance:
            return True
        scale = max(sum(float(each.norm()) for each in slopes), float(self.whole.slopes.norm()))
        return float((sum(slopes[1:], slopes[0]) - self.whole.slopes).norm()) <= 4 * self._rounding * scale + 1e-9

    def _strays(self, name: str, way: PartWeight) -> bool:
        """Whether the gradient is another one though the loss is the same, or the count is none with gradients."""
        if isnan(self._weights(way)[1]):
            return True
        return self._fits(name, way) and not self._fits_gradient(way)

    @property
    def _rounding(self) -> float:
        return max(each.rounding for each in (self.whole, *self.parts))

    def _difference(self, name: str, way: PartWeight, *, is_equal: bool) -> str:
        """How the parts differ from the whole; `is_equal`: in their gradients alone."""
        weights, total = self._weights(way)
        sizes = " and ".join(list(dict.fromkeys(str(part.items) for part in self.parts))[:2])
        value = sum(p.losses[name] * w for p, w in zip(self.parts, weights, strict=True)) / (total or float("nan"))
        if is_equal:
            begin = f"the gradient is not that of its micro-batches of {sizes} items, {way}, though the loss is"
        else:
            begin = (
                f"the loss is not that of its micro-batches: {self.whole.losses[name]:.6g} for {self.whole.items} items"
                f" at once, {value:.6g} in micro-batches of {sizes}, {way}"
            )
        return (
            f"{begin}; it couples the samples of a batch, or averages over something else, or the batch is not cut"
            " along its items"
        )


@dataclass(frozen=True)
class Probe:
    """Compares the loss of a batch with those of its micro-batches and leaves no trace.

    In fp32, without dropout, with constants for random numbers, with batch normalisation in eval mode. A batch that is
    to be cut is computed under `no_grad`, which needs far less memory; where even that does not fit, a part of it is.
    Gradients are compared of a batch that accumulates, and of a first micro-batch.
    """

    objective: Objective
    model: nn.Module
    modules: Sequence[nn.Module]
    device: torch.device
    autocast: Any = None  # for models that do not run without
    parameters: Sequence[nn.Parameter] = ()  # whose gradients are compared
    learns: bool = True  # whether they are

    def compared(
        self, batch: Any, items: int, size: int | None, split: Split, may_go_on: Callable[[], bool] = lambda: True
    ) -> PartsComparison | Verdict | None:
        """The comparison with parts of at most `size`, or of sizes that differ; a verdict where there is one already.

        None where it does not fit, or where the whole batch has no finite loss. `may_go_on` is asked after the first
        call of the person's code, whose every trace should be gone then.
        """
        for context in (None, self.autocast) if self.autocast is not None else (None,):
            rows = items
            while rows >= 2:
                try:
                    part = _fresh(batch if rows == items else part_of(_fresh(batch), items, slice(0, rows), split)[0])
                    least = None if size is None else min(size, max(rows // 2, 1))
                    return self._compared(part, rows, least, split, context, may_go_on)
                except _Useless:
                    break
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                clear(self.device)
                rows //= 2
        return None

    def _compared(
        self, batch: Any, items: int, size: int | None, split: Split, context: Any, may_go_on: Callable[[], bool]
    ) -> PartsComparison | Verdict:
        for grad in dict.fromkeys((self.learns and size is None, self.learns)):  # some need gradients of their own
            try:
                whole = self._pass(_fresh(batch), items, context, grad=grad, watches=True)
                break
            except Exception as error:
                if isinstance(error, HotloopError | torch.AcceleratorError) or is_out_of_memory(error):
                    raise
        else:
            raise _Useless  # the step itself will say it
        if not may_go_on() or not (whole.is_counted or all(map(isfinite, whole.losses.values()))):
            raise _Useless
        if whole.is_counted:
            return Verdict(ITEMS)
        try:
            parts = self._parts(batch, items, size, split, context, grad=grad)
            within = None
            if size is not None and size > 1 and self.learns and not whole.draws and not callable(split):
                within = self._within(part_of(_fresh(batch), items, slice(0, size), split)[0], size, split, context)
        except Exception as error:
            if isinstance(error, torch.AcceleratorError) or is_out_of_memory(error):
                raise
            return Verdict(ITEMS, f"the loss could not be computed in micro-batches: {error_in_a_line(error)}")
        return PartsComparison(whole, parts, self._chance(batch, whole, context) if whole.draws else 0.0, within)

    def _within(self, batch: Any, items: int, split: Split, context: Any) -> PartsComparison | None:
        """A part with its gradient beside its own parts; None where even that does not fit."""
        try:
            whole = self._pass(_fresh(batch), items, context, grad=True)
            return PartsComparison(whole, self._parts(batch, items, None, split, context, grad=True))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        clear(self.device)
        return None

    def _parts(
        self, batch: Any, items: int, size: int | None, split: Split, context: Any, *, grad: bool
    ) -> list[_Pass]:
        """The parts of a batch; of uneven sizes where none is given, which tells means by items from others."""
        given, half, last = _fresh(batch), items // 2, items - items // 6
        cuts = [(0, half), (half, last), (last, items)] if size is None else [*bounds(items, size)]
        found = []
        for start, stop in [(0, 1), (1, items)] if size == 1 and items > 8 else cuts:
            if start < stop:
                part, weight = part_of(given, items, slice(start, stop), split)
                seen = self._pass(part, stop - start, context, grad=grad)
                found.append(replace(seen, weight=None if weight is None else float(weight)))
        return found

    def _chance(self, batch: Any, whole: _Pass, context: Any) -> float:
        """By how much the loss differs between draws: masks of parts are others than those of the whole batch."""
        counts = [1000 * n for n in range(1, DRAWS + 1)]  # after a few, NumPy's permutations are often the same
        others = [self._pass(_fresh(batch), whole.items, context, grad=False, drawn=count) for count in counts]
        return 3 * max(abs(other.losses[name] - value) for other in others for name, value in whole.losses.items())

    def _pass(
        self, batch: Any, items: int, context: Any, *, grad: bool, drawn: int = 0, watches: bool = False
    ) -> _Pass:
        """A pass over a batch, after so many numbers were `drawn` from Python and NumPy; `watches` if it draws any."""
        before = PassSnapshot(self.modules, self.device)
        before.take()
        draw(drawn)
        states = _host_states() if watches else {}
        settled, counts = _Settled(), Denominators()
        off = torch.autocast(self.device.type, enabled=False) if context is None else context
        try:
            with warnings.catch_warnings(), torch.set_grad_enabled(grad), off, eager(), _in_eval(self.modules):
                warnings.simplefilter("ignore")  # the step itself says it
                with settled:
                    losses = observed(self.objective, self.objective, self.model, batch, counts)
                    gradients = self._gradients(losses.total) if grad else None
            total = losses.total.detach()
            values = {name: float(value.detach().double().item()) for name, value in losses.parts.items()}
            tf32 = _tf32(self.device) or (settled.convolves and backend_of(self.device).has_tf32)
            return _Pass(
                {**values, TOTAL: float(total.double().item())},
                items,
                [(float(each.value), each.by_values, bool(each.size)) for each in counts.counts],
                {
                    name: way_of_pytorch(counts, loss, items)
                    for name, loss in {**losses.parts, TOTAL: losses.total}.items()
                },
                losses.is_counted,
                HALVED if settled.rounds else TF32 if tf32 else EXACT,
                None if gradients is None else _slopes(gradients),
                watches and not same_state(states, _host_states()),
            )
        finally:
            before.restore()

    def _gradients(self, loss: Tensor) -> list[Tensor | None] | None:
        """The gradient of each parameter; None where the loss has none, or where hooks would see it."""
        trained = [p for p in self.parameters if p.requires_grad]
        if not trained or not loss.requires_grad or any(map(gradient_hooks, trained)):
            return None
        return list(torch.autograd.grad(loss, trained, allow_unused=True))


def _slopes(gradients: Sequence[Tensor | None]) -> Tensor:
    """A number for each gradient, which adds up as gradients do: its product with a fixed random direction."""
    found = torch.zeros(len(gradients), dtype=torch.float64)
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
            dense = torch.view_as_real(dense) if dense.is_complex() else dense
            generator = torch.Generator(dense.device).manual_seed(place)
            direction = torch.randn(dense.shape, generator=generator, device=dense.device)
            found[place] = (dense.float() * direction).sum(dtype=torch.float64).item()
    return found


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
    if not backend_of(device).has_tf32:
        return False
    with suppress(RuntimeError):  # the person has set precisions by the newer names: then the older cannot be read
        return torch.get_float32_matmul_precision() != "highest"
    return True


def _fresh(batch: Any) -> Any:
    """A batch with tensors and containers of its own."""
    return map_tensors(batch, torch.clone)
