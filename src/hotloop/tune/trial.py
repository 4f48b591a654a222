"""Plans timed on the person's own loop: contestants train copies of the weights, in turns, on the same batches."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.clock import Clock, synchronize
from hotloop.data import Stream
from hotloop.data.resident import Resident
from hotloop.effects import ReachableState
from hotloop.levers import Lever
from hotloop.placement import map_tensors
from hotloop.plan import Plan
from hotloop.rng import Generator, RngStates
from hotloop.snapshot import CannotCopy, Snapshot
from hotloop.step.cuda_graph import WARM_UP, CannotCapture
from hotloop.step.objectives import TrainedObjective
from hotloop.step.several import Stretch, why_not_captured
from hotloop.step.training import TrainingStep
from hotloop.text import shorten
from hotloop.tune.search import Drift, PlanComparison, Refused

BLOCK = 0.03  # seconds that a block of steps should take at least
ROUNDS = 5
FEWER_ROUNDS = 3  # where a step is slow
SLOW = 0.05  # seconds of such a step
HOPELESS = 0.9  # a plan that is this much slower in its first round gets no second one
CLEAR = 1.1  # one that is this much faster in the first two needs no third
STREAMED = 0.3  # seconds for which a loader is read to time it
GATE_STEPS = 10  # whose losses are compared: later ones differ by what rounding has grown to
DRIFT_STEPS = 5  # of a plan from the cache that are compared
MOST_STREAMED = 64  # batches of it, and at least 3


@dataclass(frozen=True)
class Material:
    """What the contestants train on."""

    batches: Sequence[Any]  # on the device
    loader: Any = None  # where it can be read again without changing anything
    resident: Resident | None = None
    drawn: Sequence[Any] = ()  # what the sampler drew for full batches, where the data can live on the device
    transform: Callable[[Any], Any] | None = None  # of batches on the device

    def batch(self, number: int, resident: bool) -> Any:
        """A batch on the device: one that was read before, or gathered anew from data that lives there."""
        if not resident or self.resident is None:
            # A copy: the person's code may write into it, or take something out of it.
            return map_tensors(self.batches[number % len(self.batches)], torch.clone)
        batch = self.resident.gather(self.resident.items(), self.draw(number))
        return batch if self.transform is None else self.transform(batch)

    def draw(self, number: int) -> Any:
        """What the sampler drew for a batch; the same ones come round as where batches were read before."""
        return self.drawn[number % (len(self.batches) or len(self.drawn))]


class Trials:
    """A contest of plans; the weights, the optimizers and all random states are as before when it ends."""

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        objectives: tuple[TrainedObjective, ...],
        averages: bool,
        material: Material,
    ) -> None:
        self.seen: Callable[[], ReachableState] | None = (
            None  # looks at what a step may change, where none was watched before
        )
        self.effects: list[str] = []  # names of what the first step changed and cannot be restored
        self._model, self._modules, self._objectives, self._averages = model, modules, objectives, averages
        self._material = material
        self._optimizers = [optimizer for each in objectives for optimizer in each.optimizers]
        self._entered: dict[Plan, _Contestant] = {}
        self._reference: _Contestant | None = None
        self._noise = (0.0, 0.0)
        self.is_random = False  # whether a plain step draws random numbers
        self.alone: float | None = None  # seconds of a plain step without the loader's part
        self.compiled: dict[str, float] = {}  # seconds of the compilations so far

    @contextmanager
    def running(self, device: torch.device, generators: Sequence[Generator]) -> Iterator[None]:
        """Copy everything aside; put it back at the end, whatever happens."""
        self._device = device
        self._origin = Snapshot.of(self._modules, self._optimizers)
        self._random = RngStates(device, generators)
        try:
            self._start = self._origin.copied()
        except CannotCopy as error:
            raise Refused(f"the model holds what cannot be copied aside: {error}") from error
        try:
            yield
        finally:
            self._origin.restore()
            self._random.restore()
            self._entered.clear()
            self._reference = None
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def time(self, plan: Plan) -> float:
        """Seconds of a step of the plain plan; its losses are what the others are held to."""
        self._reference = reference = self._enter_watched(plan)
        steps = _steps_for(reference.pace)
        self.alone = statistics.median(reference.block(steps) for _ in range(FEWER_ROUNDS))
        self.is_random = reference.is_random  # asked now: reading the loader, later, draws numbers too
        if self.is_random:
            self._noise = self._noise_of(plan, len(reference.losses))
        return self._streamed(plan) if self._material.loader is not None else self.alone

    def _enter_watched(self, plan: Plan) -> "_Contestant":
        """The plain plan; its first step is the only one where it changes what cannot be restored."""
        if self.seen is not None:
            before, watch = self.seen(), self.seen
            step = TrainingStep(self._model, self._objectives, plan, averages=self._averages)
            first = _Contestant(step, self._start.copied(), self._random, self._material, self._stage)
            first.block(1)
            self.effects = before.changes(watch())
            if self.effects:
                raise Refused(f"a step changes {shorten(self.effects, 4)}, which trials cannot restore")
        return self._enter(plan)

    def drift(self, plain: Plan, plan: Plan) -> Drift:
        """How far a few steps of a plan go from those of the plain one."""
        self._reference = reference = self._enter(plain)
        other = self._enter(plan)
        for each in (reference, other):
            if len(each.losses) < DRIFT_STEPS:
                each.block(DRIFT_STEPS - len(each.losses))
        if reference.is_random:
            self._noise = self._noise_of(plain, DRIFT_STEPS)
        return other.drift(reference, self._noise)

    def compare(self, plan: Plan, other: Plan) -> PlanComparison:
        """Time two plans in turns."""
        if (plan.stream, plan.pinned, plan.workers) != (other.stream, other.pinned, other.workers):
            return self._compare_streams(plan, other)
        a = self._enter(plan)
        start = time.perf_counter()
        b = self._enter(other)
        cost = time.perf_counter() - start
        if other.compile != plan.compile:
            self.compiled[other.compile] = cost
        steps = _steps_for(min(a.pace, b.pace))
        before: list[float] = []
        after: list[float] = []
        for _ in range(ROUNDS if a.pace < SLOW else FEWER_ROUNDS):
            before.append(a.block(steps))
            after.append(b.block(steps))
            ratios = [x / y for x, y in zip(before, after, strict=True)]
            if max(ratios) < HOPELESS or (len(ratios) > 1 and min(ratios) > CLEAR):
                break
        drift = b.drift(self._reference, self._noise) if self._reference else None
        comparison = PlanComparison(tuple(before), tuple(after), cost, drift)
        loser = other if not comparison.is_above_noise() or (drift and drift.excess()) else plan
        if self._entered.get(loser) is not self._reference:
            self._entered.pop(loser, None)
        return comparison

    def compile_estimate(self, lever: Lever) -> float:
        """Seconds that a compilation will take: as long as the last one, or by the size of the model."""
        guess = self.compiled.get("default") or guess_of_compilation(self._model)
        return guess if lever.cost == "a compilation" else 8 * guess

    def step_of(self, plan: Plan) -> TrainingStep | None:
        """The step that was tried for a plan, with what it compiled; what it captured is dropped."""
        return self._entered[plan].step if plan in self._entered else None

    def pace(self, plan: Plan) -> float:
        """Seconds of a step of a plan, roughly."""
        return self._enter(plan).pace

    def _enter(self, plan: Plan) -> "_Contestant":
        if plan not in self._entered:
            try:
                state = self._start.copied()
                if plan.channels_last:
                    state = state.in_format(torch.channels_last)
                step = TrainingStep(self._model, self._objectives, plan, averages=self._averages)
                contestant = _Contestant(step, state, self._random, self._material, self._stage)
                contestant.warm_up()
            except torch.OutOfMemoryError as error:
                raise Refused("out of memory while it was tried beside the plan so far") from error
            except CannotCapture as error:
                raise Refused(f"it cannot be captured: {error}") from error
            except Exception as error:
                if self._reference is None:  # the plain loop itself fails
                    raise
                first = (str(error).strip().splitlines() or [""])[0]
                what = "the step fails with it" if plan.compile == "off" else "the compiler failed"
                raise Refused(f"{what}: {type(error).__name__}: {first}") from error
            if step.obstacle:
                raise Refused(step.obstacle)
            self._entered[plan] = contestant
        return self._entered[plan]

    def _stage(self) -> Snapshot:
        return Snapshot.of(self._modules, self._optimizers)

    def _noise_of(self, plan: Plan, steps: int) -> tuple[float, float]:
        """How far two plain runs go from each other when only their random numbers differ."""
        step = TrainingStep(self._model, self._objectives, plan, averages=self._averages)
        other = _Contestant(step, self._start.copied(), self._random, self._material, self._stage, seed=1)
        other.block(steps)
        assert self._reference is not None
        drift = other.drift(self._reference, (0.0, 0.0))
        return drift.loss, drift.direction

    def _compare_streams(self, plan: Plan, other: Plan) -> PlanComparison:
        if self._material.loader is None:
            raise Refused("the loader cannot be read twice without changing what it gives")
        pairs = [(self._streamed(plan), self._streamed(other)) for _ in range(FEWER_ROUNDS)]
        before, after = zip(*pairs, strict=True)
        return PlanComparison(before, after, 0.0)

    def _streamed(self, plan: Plan) -> float:
        """Seconds of a step with the loader's part in it, the start of an epoch included where it is short."""
        assert self._reference is not None
        loader = self._material.loader
        most = max(3, min(MOST_STREAMED, round(STREAMED / self._reference.pace)))
        transform = self._material.transform
        stream = Stream(loader, self._device, plan.stream, transform, pinned=plan.pinned, workers=plan.workers)
        slow = self._reference.pace > SLOW  # then the loader's part is timed apart: training would take too long
        with self._reference.on_stage():
            synchronize(self._device)
            start, done = time.perf_counter(), 0
            for batch in stream:
                if not slow:
                    self._reference.step(batch)
                done += 1
                if done >= most:
                    break
                if done == 1 and len(loader) > most:  # of a long epoch the start is a small part
                    synchronize(self._device)
                    start, done, most = time.perf_counter(), 0, most - 1
            synchronize(self._device)
            taken = time.perf_counter() - start
        self._random.restore()
        if not slow or self.alone is None:
            return taken / done
        # A GPU computes while the host loads; a CPU does one after the other.
        return max(self.alone, taken / done) if self._device.type == "cuda" else self.alone + taken / done


class _Contestant:
    """A plan with weights of its own; it is on stage only while it trains."""

    def __init__(
        self,
        step: TrainingStep,
        state: Snapshot,
        random: RngStates,
        material: Material,
        now: Callable[[], Snapshot],
        seed: int | None = None,
    ) -> None:
        self.step = step
        self.losses: list[Tensor] = []
        self.gradient: list[Tensor] = []  # of the first step
        self._state = state
        self._random = random
        self._material = material
        self._now = now
        self._seed = seed
        self._at = 0
        self._stretch: Stretch | None = None
        self.pace = 0.0  # seconds of a step, roughly
        self._device = step.device
        self._began = random

    @property
    def is_random(self) -> bool:
        """Whether its steps drew random numbers."""
        return not (self._random.same_on_device(self._began) and self._random.same_on_host(self._began))

    @contextmanager
    def on_stage(self) -> Iterator[None]:
        self._state.restore()
        self._random.restore()
        self.step.levers.apply()
        if self._seed is not None:
            torch.manual_seed(self._seed)
            self._seed = None
        try:
            yield
        finally:
            self._state = self._now()
            self._random = RngStates(self._device)
            self.step.levers.revert()

    def warm_up(self) -> None:
        """Run until it is as fast as it will be: compiled, captured, its algorithms chosen."""
        plan = self.step.plan
        for _ in range(WARM_UP + 2 if plan.graph else 1):
            self.pace = self.block(1)
            if self.step.obstacle:
                return
        if not plan.graph and self.pace < SLOW:
            self.pace = self.block(1)
        if plan.graph > 1 and self._material.resident is not None:
            drawn = self._material.drawn
            with self.on_stage():
                captured, steps = self.step.captured, min(plan.graph, len(drawn))
                assert captured is not None
                items, transform = self._material.resident.items(), self._material.transform
                batch = self._material.resident.gather(items, drawn[0])
                if transform is not None and (why := why_not_captured(transform, batch, self._device)):
                    raise CannotCapture(why)
                self._stretch = Stretch(captured, items, len(drawn[0]), steps, transform)
            self.pace = self.block(1)

    def block(self, steps: int) -> float:
        """Train a number of steps; seconds of each."""
        with self.on_stage():
            synchronize(self._device)
            clock = Clock(self._device)
            done = self._train(steps)
            return clock.seconds() / done

    def _train(self, steps: int) -> int:
        if self._stretch is not None:
            length = self._stretch.steps
            stretches = max(1, steps // length)
            for _ in range(stretches):
                chunk = [self._material.draw(self._at + i) for i in range(1, length + 1)]
                self._at += length
                losses = self._stretch.run(chunk)
                assert losses is not None  # there is no schedule
                self.losses += losses.float().sum(1).unbind()
            return stretches * length
        for _ in range(steps):
            self.losses.append(_total(self.step(self._next())))
            if len(self.losses) == 1:
                self.gradient = [
                    p.grad.clone() for each in self.step.objectives for p in each.parameters if p.grad is not None
                ]
        return steps

    def _next(self) -> Any:
        self._at += 1
        return self._material.batch(self._at, self.step.plan.stream == "resident")

    def drift(self, reference: "_Contestant", noise: tuple[float, float]) -> Drift:
        """How far it went from another one, over the steps that both have made."""
        pairs = min(len(self.losses), len(reference.losses), GATE_STEPS)
        mine, theirs = (torch.stack(c.losses[:pairs]).double() for c in (self, reference))
        scale = theirs.abs().mean().clamp_min(1e-12)
        loss, apart = (mine - theirs).mean().abs() / scale, (mine - theirs).abs().mean() / scale
        direction = 1 - _cosine(self.gradient, reference.gradient)
        return Drift(float(loss), direction, *noise, apart=float(apart))


def guess_of_compilation(model: nn.Module) -> float:
    """Seconds that the compiler will take for a model, by its layers."""
    return 10 + 0.25 * sum(1 for module in model.modules() if not any(True for _ in module.children()))


def _steps_for(seconds: float) -> int:
    return max(1, min(200, round(BLOCK / max(seconds, 1e-6))))


def _total(parts: dict[str, Tensor]) -> Tensor:
    return torch.stack([value.reshape(()).float() for value in parts.values()]).sum()


def _cosine(a: list[Tensor], b: list[Tensor]) -> float:
    if len(a) != len(b):
        return 0.0
    dot = sum((x.double().flatten() @ y.double().flatten()) for x, y in zip(a, b, strict=True))
    norms = [sum(x.double().square().sum() for x in each) for each in (a, b)]
    product = torch.as_tensor(norms[0]).sqrt() * torch.as_tensor(norms[1]).sqrt()
    return float(dot / product.clamp_min(1e-30)) if float(product) else 1.0
