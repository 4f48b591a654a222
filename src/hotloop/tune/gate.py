"""The gate: losses and gradients of a real batch, in two questions.

What lowers the precision is compared with fp32 as written, by the whole gradient (`Departure`). What is meant to
compute the same, such as compiled code, is compared with the eager step under the same flags, parameter by parameter
(`stray`).
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotloop._torch import compiler_error
from hotloop.levers import Lever, rounding_levers, without
from hotloop.memory.oom import clear, is_out_of_memory
from hotloop.objective.objectives import HALF_PRECISIONS
from hotloop.plan import Plan
from hotloop.printing.text import error_in_a_line
from hotloop.step.arithmetic import Work
from hotloop.step.inspection import Inspection
from hotloop.step.sharding import is_sharded
from hotloop.step.training import TrainingStep
from hotloop.tune.tuned_run import Compared
from hotloop.values.rng import RngStates
from hotloop.values.snapshot import Snapshot

LOSS_TOLERANCE = 0.02  # departure of the loss, as a share of it
SURE = 0.01  # below this angle the gradient says more than the loss, which may be a difference near 0
# How far the cosine to the plain gradient may fall below 1. The figures behind these three: docs/did-not-pay.md
DIRECTION_TOLERANCE = 0.1
LATER_TOLERANCE = 0.5  # once what a batch has in common with others is learnt
SHAKEN = 4.0  # times as far as fp32's own gradient turns where its weights are rounded to bf16
MOST_SHAKEN = 0.25  # departure of the loss, whatever rounded weights do
# Code that is meant to compute the same: what is this near to the eager gradient of a parameter needs no other look.
NEAR, NEAR_IN_HALF = 0.01, 0.1
OTHER_DRAWS = 1.5  # times as far as another draw of dropout turns a gradient, since both differ by a draw
ENOUGH = 16  # numbers in a parameter, of which one other draw tells something
SMALL_SAMPLE = 4.0  # for a parameter of n numbers the bound is 1 + SMALL_SAMPLE / sqrt(n) times as wide
DIGITS = {"fp32": 24, "bf16": 8, "fp16": 11}  # binary ones of a number
TF32_DIGITS = 11
LENGTH_TOLERANCE = 1.25  # times that the norm of the gradient may be larger or smaller
_DROPS = re.compile(r"drop", re.IGNORECASE)

Found = tuple[dict[str, Tensor], Sequence[Tensor | None]]  # named losses, and the gradient of each weight


@dataclass(frozen=True)
class Departure:
    """How far loss and gradient of one batch are from those of the loop as written."""

    loss: float  # as a share of the plain loss
    direction: float  # 1 - cosine between the gradients
    length: float  # norm of the gradient, in times the plain one
    norm: float  # of the plain gradient

    @classmethod
    def between(cls, plain: Found, other: Found) -> "Departure":
        """The departure of a plan's losses and gradients from the baseline's. Synchronizes."""
        figures = _figures(plain, other)
        if figures is None:
            return cls(math.inf, math.inf, math.inf, math.inf)
        distance, scale, dot, first, second = figures.tolist()
        if first == second == 0.0:
            return cls(distance / max(scale, 1e-12), 0.0, 1.0, 0.0)
        norm = math.sqrt(first)
        norms = norm * math.sqrt(second) if math.isfinite(first + second) else math.nan
        direction = 1 - dot / norms if norms else math.inf
        length = math.sqrt(second / first) if first else math.inf
        return cls(distance / max(scale, 1e-12), direction, length, norm)

    def excess(self, *, later: bool = False, shaken: "Departure | None" = None) -> str | None:
        """What is outside the tolerance, in words; None where nothing is.

        `later`: training is under way. `shaken`: the departure of fp32 with rounded weights.
        """
        most, away = LATER_TOLERANCE if later else DIRECTION_TOLERANCE, LOSS_TOLERANCE
        if shaken is not None:
            most = max(most, min(SHAKEN * shaken.direction, 1.0))  # beyond a right angle it is another direction
            away = max(away, min(SHAKEN * shaken.loss, MOST_SHAKEN))
        if not self.direction <= most:
            cosine, least = 1 - self.direction, 1 - most
            return f"the gradient turns from that of fp32: cosine {cosine:.3f}, at least {least:.2f} is allowed"
        if not 1 / LENGTH_TOLERANCE <= self.length <= LENGTH_TOLERANCE:
            times = f"{self.length:.3g}" if self.length < 1000 else f"{self.length:,.0f}"
            return f"the gradient is {times} times as long as that of fp32"
        if not self.loss <= away and not self.direction <= SURE:
            return f"the loss is {self.loss:.1%} from that of fp32; {away:.1%} is allowed"
        return None

    def has_jumped_too(self, usual: float) -> bool:
        """Whether the norm of the fp32 gradient is more than usual too, so that the plan is not the cause."""
        return not self.norm <= usual and not self.length > LENGTH_TOLERANCE


def stray(
    step: TrainingStep, eager: Found, other: Found, disturb: Callable[[], Found | None], *, random: bool = False
) -> str | None:
    """The loss or the parameter whose gradient is not that of the eager step, in words; None where all are.

    Where some are not near, `disturb` gives the same pass of `step` with its rounding disturbed, or with other random
    numbers where the two passes drew different ones (`random`); None where that cannot be.
    """
    known = {id(parameter): name for name, parameter in step.model.named_parameters()}
    names = [f"the loss {name}" if len(eager[0]) > 1 else "the loss" for name in eager[0]]
    trained = [parameter for each in step.objectives for parameter in each.parameters]
    names += [f"the gradient of {known.get(id(p), 'a parameter outside the model')}" for p in trained]
    counts = [0] * len(eager[0]) + [p.numel() for p in trained]
    near = NEAR_IN_HALF if step.plan.precision in HALF_PRECISIONS else NEAR
    away, own = _distances(eager, other)
    lengths = [length for length, count in zip(own, counts, strict=True) if count and math.isfinite(length)]
    usual = math.hypot(*lengths) / math.sqrt(max(sum(counts), 1))  # of a single number
    # What is 0 but for rounding may differ by a small part of what is usual; what the eager step has lost, by anything.
    allowed = [near * (length + near * usual * math.sqrt(n)) for length, n in zip(own, counts, strict=True)]
    far = [i for i, most in enumerate(allowed) if not away[i] <= most and math.isfinite(own[i])]
    if not far:
        return None
    disturbed = disturb()
    moved = [0.0] * len(own) if disturbed is None else _distances(eager, disturbed)[0]
    for i in far:
        bound = (OTHER_DRAWS if random else SHAKEN) * (1 + SMALL_SAMPLE / math.sqrt(max(counts[i], 1))) * moved[i]
        if random and counts[i] < ENOUGH:
            bound = math.inf if counts[i] else max(bound, MOST_SHAKEN * own[i])
        if not away[i] <= bound:
            shares = [each / own[i] if own[i] else math.inf for each in (away[i], moved[i])]
            by = "other random numbers move" if random else "rounding moves"
            return (
                f"{names[i]} is {shares[0]:.3g} of itself away from the eager step's, where {by} it by {shares[1]:.2g}"
            )
    return None


class GradientGate:
    """Compares losses and gradients of a plan with fp32 on real batches, and restores everything afterwards.

    `agreed` gives the reason of the first rank that has one.
    """

    def __init__(self, loop: Compared, agreed: Callable[[str | None], str | None] = lambda why: why) -> None:
        self.passes = 0  # forward passes
        self._loop, self._agreed = loop, agreed

    def asked(
        self, begin: Plan, plain: Any, batch: Any, shaken: dict[str, Departure] | None = None
    ) -> tuple[Sequence[Lever], str | None]:
        """The levers of the present plan that do not pass, and why; none where all do.

        `plain`: losses and gradients of the plan `begin`, without dropout. `shaken` is that of `excess`.
        """
        step, modules, eager = self._loop.step, self._loop.memory.modules, plain
        rounding = rounding_levers(step.plan, begin)
        same = [lever for lever in rounding if lever.computes_the_same]
        others = [lever for lever in rounding if lever not in same]
        compiles, work = step.plan.compile != "off", Work()

        def without_the_same() -> AbstractContextManager[TrainingStep]:
            return self._loop.trying(without(same, step.plan)) if same else nullcontext(step)

        if others:
            with without_dropout(modules):
                with without_the_same() as lowered:
                    eager = self.gradients(lowered, batch)
                why = eager if isinstance(eager, str) else self.excess(plain, eager, batch, shaken)
            if (why := self._agreed(why)) is not None:
                return others, why
        if not same:
            return (), None
        # Compiled code would be compiled anew without dropout; it draws masks of its own.
        with nullcontext() if compiles else without_dropout(modules):
            if compiles:
                with without_the_same() as lowered:
                    eager = self.gradients(lowered, batch, work)
            found = self.gradients(step, batch)
            why = next((each for each in (eager, found) if isinstance(each, str)), None)
            if why is None:
                why = self.stray(eager, found, batch, random=compiles and work.draws)
        return same, self._agreed(why)

    def gradients(
        self, step: TrainingStep, batch: Any, work: Work | None = None, seen: Inspection | None = None
    ) -> Any:
        """Losses and gradients of a batch, or the reason why the step fails."""
        self.passes += len(step.objectives)
        try:
            with work or nullcontext():
                return step.gradients_of(batch, self._loop.memory, seen)
        except Exception as error:  # noqa: BLE001  # a plan under which the person's code fails is not used
            failed = error.with_traceback(None)  # which would keep what the pass has allocated
        if is_out_of_memory(failed):
            clear(step.device)
            return "there is no memory to compare it with fp32"
        return f"the step fails with it: {error_in_a_line(compiler_error(failed))}"

    def excess(
        self,
        plain: Any,
        other: Any,
        batch: Any,
        shaken: dict[str, Departure] | None = None,
        *,
        later: bool = False,
    ) -> str | None:
        """Why loss and gradient are not those of fp32; None where they are, as far as the network allows it.

        Where the gradient turns too far, it is looked at how far that of fp32 does with rounded weights; `shaken` keeps
        that for the next question about this batch.
        """
        departure, precision = Departure.between(plain, other), self._loop.step.plan.precision
        why = departure.excess(later=later)
        widest = Departure(math.inf, math.inf, 1.0, 0.0)  # of fp32 with rounded weights, whatever that may be
        if why is None or precision not in HALF_PRECISIONS or departure.excess(later=later, shaken=widest) is not None:
            return why
        known = {} if shaken is None else shaken
        if precision not in known:
            rounded = rounded_weights(self._loop.memory.modules, DIGITS[precision])
            if (found := self._disturbed(batch, rounded)) is None:
                return why
            known[precision] = Departure.between(plain, found)
        return departure.excess(later=later, shaken=known[precision])

    def stray(self, eager: Any, other: Any, batch: Any, *, random: bool = False) -> str | None:
        """Which loss or gradient of the present step is not that of the eager step under the same flags.

        How far it moves by itself is shown by other random numbers, or by weights without their last digit.
        """
        step = self._loop.step
        digits = TF32_DIGITS if step.plan.tf32 else DIGITS[step.plan.precision]
        disturbed = _other_draws(step.device) if random else rounded_weights(self._loop.memory.modules, digits, spare=1)
        return stray(step, eager, other, lambda: self._disturbed(batch, disturbed), random=random)

    def _disturbed(self, batch: Any, disturbed: AbstractContextManager[None]) -> Any:
        """Losses and gradients as written, with something disturbed; None where that cannot be."""
        if is_sharded(self._loop.step.model):
            return None  # a pass of one rank alone would wait for the others
        try:
            with self._loop.as_written() as step, disturbed:
                found = self.gradients(step, batch)
        except torch.OutOfMemoryError:
            clear(self._loop.step.device)
            return None
        return None if isinstance(found, str) else found


def comparison(device: torch.device) -> None:
    """Run the operations of a comparison, and of the watch over losses, on one number."""
    one = torch.zeros(1, device=device)
    found: Found = ({"loss": one}, [one])
    _figures(found, found)
    Snapshot().values([one]).take()


def _figures(plain: Found, other: Found) -> Tensor | None:
    """Distance and sum of the losses, and the gradients' dot products, on the device; None where they are of other
    weights."""
    losses = [torch.stack([v.double().sum() for v in parts.values()]) for parts, _ in (plain, other)]
    pairs = [(a, b) for a, b in zip(plain[1], other[1], strict=True) if a is not None or b is not None]
    if any(a is None or b is None or a.is_sparse != b.is_sparse for a, b in pairs):
        return None
    products = _dot_products([(a, b) for a, b in pairs if a is not None and b is not None], losses[0])
    return torch.stack([(losses[1] - losses[0]).abs().sum(), losses[0].abs().sum(), *products])


def _distances(eager: Found, other: Found) -> tuple[list[float], list[float]]:
    """How far each loss and each gradient is from the eager one, and how long that is. Synchronizes once."""
    first = [*(loss.sum() for loss in eager[0].values()), *eager[1]]
    second = [*(loss.sum() for loss in other[0].values()), *other[1]]
    zero = torch.zeros((), dtype=torch.float64, device=next(iter(eager[0].values())).device)
    away = [_length(_difference(a, b), zero) for a, b in zip(first, second, strict=True)]
    found = torch.stack([*away, *(_length(a, zero) for a in first)]).tolist()
    return found[: len(away)], found[len(away) :]


def _difference(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a - b if a.is_sparse == b.is_sparse else a.to_dense() - b.to_dense()


def _length(numbers: Tensor | None, zero: Tensor) -> Tensor:
    return zero if numbers is None else torch.linalg.vector_norm(_numbers(numbers), dtype=zero.dtype).to(zero.device)


def _dot_products(pairs: Sequence[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of a·b, a·a and b·b over pairs of gradients, on the device of `like`."""
    sums: tuple[list[Tensor], ...] = ([], [], [])
    for a, b in pairs:
        x, y = map(_numbers, (a, b))
        for parts, (p, q) in zip(sums, ((x, y), (x, x), (y, y)), strict=True):
            parts.append((p * q).sum(dtype=torch.float64).to(like.device))
    dot, first, second = (torch.stack(parts).sum() if parts else like.new_zeros(()) for parts in sums)
    return dot, first, second


def _numbers(gradient: Tensor) -> Tensor:
    """The values of a gradient, sparse or complex too, as real numbers."""
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).float()


@contextmanager
def rounded_weights(modules: Sequence[nn.Module], digits: int, spare: int = 0) -> Iterator[None]:
    """Round the weights of modules to so many binary digits inside the block, and to `spare` fewer than they have."""
    weights = {id(p): p.detach() for module in modules for p in module.parameters() if p.is_floating_point()}.values()
    before = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            own = 1 - round(math.log2(torch.finfo(weight.dtype).eps))
            if lost := own - min(own, digits) + spare:
                high = weight * (2.0**lost + 1)  # which takes memory, and may fail halfway
                weight.copy_(high - (high - weight))
        yield
    finally:
        for weight, numbers in zip(weights, before, strict=True):
            weight.copy_(numbers)


@contextmanager
def _other_draws(device: torch.device) -> Iterator[None]:
    """Other random numbers inside the block."""
    before = RngStates(device)
    torch.manual_seed(torch.initial_seed() % 2**31 + 1)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def without_dropout(modules: Sequence[nn.Module]) -> Iterator[bool]:
    """Turn dropout off inside the block; yields whether any was on. Masks differ between precisions.

    What dropout is called is known by name: numbers between 0 and 1 in attributes such as `p` of `nn.Dropout`,
    `dropout` of `nn.LSTM`, `attention_dropout`, `drop_prob`.
    """
    before: list[tuple[nn.Module, str, float]] = []
    for outer in modules:
        for module in outer.modules():
            is_dropout = _DROPS.search(type(module).__name__) is not None
            numbers = [(name, value) for name, value in vars(module).items() if isinstance(value, float)]
            before += [
                (module, name, value)
                for name, value in numbers
                if 0 < value <= 1 and (_DROPS.search(name) or (is_dropout and name == "p"))
            ]
    for module, name, _ in before:
        vars(module)[name] = 0.0
    try:
        yield bool(before)
    finally:
        for module, name, value in before:
            vars(module)[name] = value
