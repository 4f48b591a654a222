"""`tune`: plans timed in turns on real steps of the person's own loop, all undone afterwards."""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from hotloop.data import Stream
from hotloop.data.loader_rng import LoaderRng
from hotloop.data.on_device import Resident, why_not_resident
from hotloop.data.origin import check_readable_again, is_in_order
from hotloop.data.samplers import generators_of, has_known_sampler
from hotloop.device.clock import Clock, synchronize
from hotloop.errors import BadArgument, PlanWarning
from hotloop.levers import LEVERS, MOST_STEPS, RESIDENT
from hotloop.memory.oom import clear, is_out_of_memory
from hotloop.placement import map_tensors, move
from hotloop.plan import Plan, Trial, Tuning
from hotloop.printing.text import shorten
from hotloop.step.arithmetic import Work
from hotloop.step.captured_graph import WARM_UP, CannotCapture
from hotloop.step.compilation import CompiledObjective, expected_seconds
from hotloop.step.retry import OutOfMemory
from hotloop.step.several import Stretch, why_not_captured
from hotloop.step.training import TrainingStep
from hotloop.tune.gate import DIGITS, Departure, disturbance, excess_of, rounded_weights, stray, without_dropout
from hotloop.tune.rehearsal import Rehearsal, rehearsing
from hotloop.tune.search import PlanComparison, Refused, Search
from hotloop.tune.subject import Subject, record
from hotloop.values.effects import watched_changes
from hotloop.values.rng import Generator, RngStates, generators_in
from hotloop.values.snapshot import Snapshot

BUDGET = 10.0  # seconds of trials, compilations apart
BATCHES = 8  # that the trials train on
BLOCK = 0.03  # seconds that a block of steps should take at least
ROUNDS = 5
FEWER_ROUNDS = 3  # where a step is slow
SLOW = 0.05  # seconds of such a step
HOPELESS = 0.9  # a plan that is this much slower in its first round gets no second one
CLEAR = 1.1  # one that is this much faster in the first two needs no third
STREAMED = 0.3  # seconds for which a loader is read to time it
MOST_STREAMED = 64  # batches of it, and at least 3


def tune(
    subject: Subject,
    memory: OutOfMemory,
    loader: Any,
    material: "Material",
    *,
    steps: int | None,
    seconds: float | None,
    tell: Callable[[str], None] = lambda words: None,
) -> tuple[Tuning, dict[str, CompiledObjective] | None]:
    """Try the levers on a loop and restore it exactly; returns the tuning, and the objectives compiled for its plan.

    `seconds` is the length of the run with the plain loop. `memory` is the loop's OOM retry.
    """
    start, plain = time.perf_counter(), subject.plan
    plain_step: float | None = None
    compiled: dict[str, CompiledObjective] | None = None
    with rehearsing(subject, generators_held(loader, material.transform)) as rehearsal:
        trials = Trials(rehearsal, memory, material)
        search = Search(trials, subject.scene(loader), plain, steps, BUDGET, tell)
        try:
            search.step = plain_step = trials.time()
            if steps is None and seconds is not None:
                search.steps = max(1, round(seconds / plain_step))
            best = search.run(LEVERS)
            compiled = trials.compiled_for(best)
            if best.stream not in ("resident", "prefetched") and not best.pinned:
                plain_step = trials.alone
                if best == plain:  # nothing was kept: one loop takes one time
                    search.step = plain_step
        except Refused as refusal:
            best, search.trials = plain, [Trial(lever.name, lever.tier, "not tried", str(refusal)) for lever in LEVERS]
            words = f"nothing is tuned: {refusal}; the one step that was tried has changed it"
            warnings.warn(words, PlanWarning, stacklevel=4)
        finally:
            trials.forget_captures()
    if best.stream == "direct" and not any(t.lever == RESIDENT.name and t.gain is not None for t in search.trials):
        best = replace(best, stream="auto")  # which was not compared: the rule decides, as without tuning
    taken = time.perf_counter() - start
    return record(subject, best, search.trials, plain_step, search.step or None, search.steps, taken), compiled


@dataclass(frozen=True)
class Material:
    """The batches of the trials."""

    batches: Sequence[Any]  # on the device
    loader: Any = None  # where it can be read again without changing anything
    resident: Resident | None = None
    drawn: Sequence[Any] = ()  # what the sampler drew for full batches, where the data can live on the device
    transform: Callable[[Any], Any] | None = None  # of batches on the device

    def batch(self, number: int, *, resident: bool) -> Any:
        """A batch on the device: a copy of one read before, or gathered from data on the device."""
        if not resident or self.resident is None:
            # A copy: the person's code may write into it, or take something out of it.
            return map_tensors(self.batches[number % len(self.batches)], torch.clone)
        batch = self.resident.gather(self.resident.items(), self.draw(number))
        return batch if self.transform is None else self.transform(batch)

    def draw(self, number: int) -> Any:
        """The sampler's indices of a batch, in the same cycle as `batches`."""
        return self.drawn[number % (len(self.batches) or len(self.drawn))]


def material_of(loader: Any, device: torch.device, transform: Any = None) -> Material:
    """Batches of a loader, read so that its rng state and position stay as they were."""
    before, rng = RngStates(device, generators_held(loader, transform)), LoaderRng(loader)
    if why_not_resident(loader, device) is None and has_known_sampler(loader):
        resident = Resident(loader, device)
        drawn = list(islice(resident.draws(), MOST_STEPS))
        full = [each for each in drawn if _length(each) == _length(drawn[0])]
        material = Material([], loader, resident, full, transform)
        batches = [material.batch(i, resident=True) for i in range(min(BATCHES, len(full)))]
        before.restore()
        return replace(material, batches=batches)
    again = loader if is_in_order(loader) and has_known_sampler(loader) else None
    began = rng.get_state()
    check_readable_again(loader, fix="tune with a DataLoader or a list")
    first = next(iter(loader), None)
    if first is None:
        raise BadArgument("the loader gave no batch to tune with", fix="give a loader that is not empty")
    batch = move(first, device)
    material = Material([batch if transform is None else transform(batch)], again, transform=transform)
    before.restore()
    rng.set_own_state(began)
    return material


def generators_held(loader: object, transform: object) -> list[Generator]:
    """The generators held by a loader, its samplers, its dataset and a transform of batches."""
    found = [*generators_of(loader), *generators_in([getattr(loader, "dataset", None), transform])]
    return list({id(generator): generator for generator in found}.values())


@dataclass(eq=False)
class _PlanRunner:
    """A plan in a contest."""

    step: TrainingStep
    pace: float | None = None  # seconds of a step, roughly, once it is as fast as it will be
    stretch: Stretch | None = None
    memory: Snapshot | None = None  # in which its captures were made: which tensors the model and the optimizers held

    def forget_captures(self) -> None:
        self.step.forget_captures()
        self.stretch = self.memory = None


class Trials:
    """Runs plans in turns, in the model's own memory: each continues with the weights that the one before left.

    Levers such as channels last move the weights. A plan with CUDA graphs then gets back the memory it captured.
    """

    def __init__(self, rehearsal: Rehearsal, memory: OutOfMemory, material: Material) -> None:
        self.alone = 0.0  # seconds of a plain step without the loader's part
        self._rehearsal, self._memory, self._material = rehearsal, memory, material
        self._subject, self._device = rehearsal.subject, rehearsal.subject.device
        self._runners: dict[Plan, _PlanRunner] = {}
        self._plain = self._runner(self._subject.plan)
        self._now = self._plain
        self._number = 0  # of the batch

    def time(self) -> float:
        """Seconds of a step of the plain plan; raises `Refused` where a step changes what cannot be restored."""
        roots = self._subject.roots({"device_transform": self._material.transform}, self._material.batches)
        changes = watched_changes(roots, self._subject.restorable())
        self._rehearsal.exchange(self._plain.step)
        self._train(self._plain, 1)
        if effects := changes():
            raise Refused(f"a step changes {shorten(effects, 4)}, which trials cannot restore")
        steps = _steps_for(self._ready(self._plain))
        self.alone = statistics.median(self._block(self._plain, steps) for _ in range(FEWER_ROUNDS))
        return self._streamed(self._subject.plan) if self._material.loader is not None else self.alone

    def compare(self, plan: Plan, other: Plan) -> PlanComparison:
        """Time two plans in turns."""
        if (plan.stream, plan.pinned, plan.workers) != (other.stream, other.pinned, other.workers):
            return self._compare_streams(plan, other)
        for beaten in self._runners.keys() - {plan, self._subject.plan}:
            self._runners.pop(beaten).forget_captures()
        try:
            return self._by_turns(self._runner(plan), self._runner(other))
        except Exception as error:  # noqa: BLE001  # a plan under which the person's code fails is not used
            why = _words(error, other)
        # Outside of `except`: the error holds the frames of the step, and they hold its tensors.
        self._exchange(self._plain)
        self._rewind()
        clear(self._device)
        raise Refused(why)

    def gate(self, plan: Plan) -> tuple[float | None, str | None]:
        """The relative departure of the loss, and why the plan does not pass the gate or None.

        Without what is meant to compute the same, it is compared with the plain plan; with that, with itself without.
        """
        self._rewind()
        batch, modules, eager_plan = self._material.batch(0, resident=False), self._subject.modules, plan
        for lever in LEVERS:
            eager_plan = lever.off(eager_plan) if lever.computes_the_same and lever.is_pulled(plan) else eager_plan

        def found(plan: Plan, disturbed: AbstractContextManager[Any] | None = None) -> Any:
            self._exchange(self._runner(plan))
            with disturbed or nullcontext():
                return self._now.step.gradients_of(batch, self._memory)

        def against_fp32() -> tuple[float, str | None]:
            plain = found(self._subject.plan)
            departure = Departure.between(plain, plain if eager_plan == self._subject.plan else found(eager_plan))

            def shake(precision: str) -> Departure:
                return Departure.between(plain, found(self._subject.plan, rounded_weights(modules, DIGITS[precision])))

            return departure.loss, excess_of(departure, plan.precision, shake)

        try:
            with without_dropout(modules):
                loss, why = against_fp32()
            if why is not None or eager_plan == plan:
                return loss, why
            work = Work()
            # Dropout is left on in compiled code, which would be compiled anew without it; it draws masks of its own.
            with nullcontext() if plan.compile != "off" else without_dropout(modules):
                eager = found(eager_plan, work if plan.compile != "off" else None)
                other, step = found(plan), self._now.step
                disturbed = disturbance(modules, step, random=work.draws)
                why = stray(step, eager, other, lambda: found(self._subject.plan, disturbed), random=work.draws)
            return Departure.between(eager, other).loss, why
        except Exception as error:  # noqa: BLE001
            return None, _words(error, plan)

    def compile_estimate(self, plan: Plan) -> float:
        """Seconds that the compilation of a plan will take."""
        return expected_seconds(self._subject.model, plan.compile).seconds

    def compiled_for(self, plan: Plan) -> dict[str, CompiledObjective] | None:
        """The objectives compiled in the trial of a plan."""
        return (self._runners[plan].step.compiled or None) if plan in self._runners else None

    def forget_captures(self) -> None:
        """Drop CUDA graphs: they hold memory, and may read freed memory after a rewind."""
        for runner in self._runners.values():
            runner.forget_captures()

    def _rewind(self) -> None:
        self.forget_captures()
        self._rehearsal.rewind()

    def _runner(self, plan: Plan) -> _PlanRunner:
        if plan not in self._runners:
            subject = self._subject
            step = TrainingStep(subject.model, subject.objectives, plan, averages=subject.averages)
            self._runners[plan] = _PlanRunner(step)
        return self._runners[plan]

    def _by_turns(self, a: _PlanRunner, b: _PlanRunner) -> PlanComparison:
        pace = self._ready(a)
        start = time.perf_counter()
        steps = _steps_for(min(pace, self._ready(b)))
        cost = time.perf_counter() - start
        before: list[float] = []
        after: list[float] = []
        for _ in range(ROUNDS if pace < SLOW else FEWER_ROUNDS):
            before.append(self._block(a, steps))
            after.append(self._block(b, steps))
            ratios = [x / y for x, y in zip(before, after, strict=True)]
            if max(ratios) < HOPELESS or (len(ratios) > 1 and min(ratios) > CLEAR):
                break
        return PlanComparison(tuple(before), tuple(after), cost)

    def _exchange(self, runner: _PlanRunner) -> None:
        before, self._now = self._now, runner
        if runner is not before and before.step.captured is not None:
            before.memory = Snapshot.of(self._subject.modules, self._subject.optimizers)
        self._rehearsal.exchange(runner.step)
        if runner is not before and runner.memory is not None:  # a lever may have moved weights or counts of steps
            runner.memory.restore()
        if runner.step.captured is not None:
            runner.step.captured.check()

    def _ready(self, runner: _PlanRunner) -> float:
        """Warm a plan up: compiled, captured, its algorithms chosen."""
        self._exchange(runner)
        step, plan, resident = runner.step, runner.step.plan, self._material.resident
        if runner.pace is not None and (step.captured is None or step.captured.has_captures):
            return runner.pace
        runner.stretch = None
        pace = 0.0
        for _ in range(WARM_UP + 2 if plan.graph else 1):
            pace = self._timed(runner, 1)
            if step.obstacle:
                raise Refused(step.obstacle)
        if not plan.graph and pace < SLOW:
            pace = self._timed(runner, 1)
        several = min(plan.graph, len(self._material.drawn))
        several -= several % plan.accumulate
        if several > 1 and resident is not None and step.captured is not None:
            items, transform, drawn = resident.items(), self._material.transform, self._material.drawn[0]
            if transform and (why := why_not_captured(transform, resident.gather(items, drawn), self._device)):
                raise CannotCapture(why)
            runner.stretch = Stretch(step.captured, items, len(drawn), several, transform)
            pace = self._timed(runner, 1)
        runner.pace = pace
        return pace

    def _block(self, runner: _PlanRunner, steps: int) -> float:
        """Seconds of a step, the mean of `steps`; a capture is not timed."""
        self._ready(runner)
        return self._timed(runner, steps)

    def _timed(self, runner: _PlanRunner, steps: int) -> float:
        synchronize(self._device)
        clock = Clock(self._device)
        done = self._train(runner, steps)
        return clock.seconds() / done

    def _train(self, runner: _PlanRunner, steps: int) -> int:
        """Train a number of steps, rounded up to whole accumulation windows; returns that number."""
        stretch, plan = runner.stretch, runner.step.plan
        length = plan.accumulate if stretch is None else stretch.steps
        steps = max(1, steps // length) * length if stretch else steps + -steps % length
        for first in range(self._number + 1, self._number + 1 + steps, length):
            if stretch is not None:
                stretch.run([self._material.draw(first + i) for i in range(length)])
                continue
            for number in range(first, first + length):
                runner.step(self._material.batch(number, resident=plan.stream == "resident"))
        self._number += steps
        return steps

    def _compare_streams(self, plan: Plan, other: Plan) -> PlanComparison:
        if self._material.loader is None:
            raise Refused("the loader cannot be read twice without changing what it gives")
        pairs = [(self._streamed(plan), self._streamed(other)) for _ in range(FEWER_ROUNDS)]
        before, after = zip(*pairs, strict=True)
        return PlanComparison(before, after, 0.0)

    def _streamed(self, plan: Plan) -> float:
        """Seconds of a step with its loading; for a short epoch with its start too."""
        loader, pace = self._material.loader, self._ready(self._plain)
        most = max(3, min(MOST_STREAMED, round(STREAMED / pace)))
        transform = self._material.transform
        stream = Stream(loader, self._device, plan.stream, transform, pinned=plan.pinned, workers=plan.workers)
        slow = pace > SLOW  # then the loader's part is timed apart: training would take too long
        synchronize(self._device)
        start, done = time.perf_counter(), 0
        for batch in stream:
            if not slow:
                self._plain.step(batch)
            done += 1
            if done >= most:
                break
            if done == 1 and len(loader) > most:  # of a long epoch the start is a small part
                synchronize(self._device)
                start, done, most = time.perf_counter(), 0, most - 1
        synchronize(self._device)
        taken = (time.perf_counter() - start) / done
        stream.close()
        self._plain.step.end_epoch()  # an accumulation window may be cut short
        self._rehearsal.rewind_rng()
        if not slow:
            return taken
        # A GPU computes while the host loads; a CPU does one after the other.
        return max(self.alone, taken) if self._device.type == "cuda" else self.alone + taken


def _words(error: Exception, plan: Plan) -> str:
    """Why a plan could not be tried."""
    if isinstance(error, Refused):
        return str(error)
    if is_out_of_memory(error):
        return "out of memory while it was tried"
    if isinstance(error, CannotCapture):
        return f"it cannot be captured: {error}"
    first = (str(error).strip().splitlines() or [""])[0]
    what = "the step fails with it" if plan.compile == "off" else "the compiler failed"
    return f"{what}: {type(error).__name__}: {first}"


def _steps_for(seconds: float) -> int:
    return max(1, min(200, round(BLOCK / max(seconds, 1e-6))))


def _length(drawn: Any) -> int:
    return len(drawn) if hasattr(drawn, "__len__") else 1
