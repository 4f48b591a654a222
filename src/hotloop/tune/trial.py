"""`tune`: lever after lever, each timed in turns with the best plan so far, on real steps that are undone."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from hotloop.data import Stream
from hotloop.data.on_device import Resident, why_not_resident
from hotloop.data.origin import check_readable_again, is_in_order
from hotloop.data.samplers import has_known_sampler
from hotloop.device.backend import backend_of
from hotloop.device.clock import Clock, synchronize
from hotloop.errors import BadArgument
from hotloop.levers import LEVERS, Lever, LeverTarget
from hotloop.levers.compile import expected_seconds
from hotloop.levers.cuda_graph import MOST_STEPS
from hotloop.memory.oom import clear, is_out_of_memory
from hotloop.placement import move
from hotloop.plan import Plan, Trial, Tuning, Verdict
from hotloop.printing.text import duration, error_in_a_line, shorten
from hotloop.step.captured_graph import WARM_UP, CannotCapture
from hotloop.step.compilation import CompiledObjective
from hotloop.step.retry import OutOfMemory
from hotloop.step.several import Stretch, why_not_captured
from hotloop.step.training import TrainingStep
from hotloop.tune.gate import GradientGate, without_dropout
from hotloop.tune.scratch import Scratch, scratch
from hotloop.tune.subject import Subject
from hotloop.tune.tuning_record import record
from hotloop.values.snapshot import Snapshot
from hotloop.values.tree import map_tensors

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
LEAST_GAIN = 1.01  # a lever that gives less is not worth having
MOST_SLOWER = 0.2  # of the rounds, in which a lever that is kept may be slower
HOPED, HOPED_LATER = 1.5, 1.05  # gains that are hoped for from a first compilation and from a longer one


def tune(
    subject: Subject,
    memory: OutOfMemory,
    loader: Any,
    transform: Any,
    *,
    steps: int | None,
    seconds: float | None,
    tell: Callable[[str], None] = lambda words: None,
) -> tuple[Tuning, dict[str, CompiledObjective] | None]:
    """Try the levers on a loop and restore it exactly; returns the tuning, and objectives compiled for its plan.

    `seconds` is the length of the run with the plain loop. `memory` is the loop's OOM retry.
    """
    start, plain = time.perf_counter(), subject.plan
    with scratch(subject, {"": loader}, transform) as space:
        material = material_of(loader, subject.device, transform)
        space.rewind_rng()
        trials = Trials(space, memory, material)
        try:
            plain_step = trials.time()
            if steps is None and seconds is not None:
                steps = max(1, round(seconds / plain_step))
            search = Search(trials, subject.scene(loader), plain, steps, step=plain_step, tell=tell)
            best = search.run(LEVERS)
            compiled = trials.compiled_for(best)
        except Refused as refusal:
            refused = [Trial(lever.name, lever.tier, "not tried", str(refusal)) for lever in LEVERS]
            taken = time.perf_counter() - start
            return record(subject, plain, refused, None, None, steps, taken), None
        finally:
            trials.forget_captures()
    if best.stream not in ("resident", "prefetched") and not best.pinned:
        plain_step = trials.alone
    step = plain_step if best == plain else search.step  # where nothing was kept, one loop takes one time
    timed = {lever.pull(plain).stream for lever in LEVERS if search.has_timed(lever)}
    if best.stream == "direct" and "resident" not in timed:
        best = replace(best, stream="auto")  # the rule decides, as without tuning
    taken = time.perf_counter() - start
    return record(subject, best, search.trials, plain_step, step, steps, taken), compiled


class Refused(Exception):
    """Raised where a plan cannot be tried; the message is the reason."""


@dataclass(frozen=True)
class PlanComparison:
    """Seconds per step of two plans, timed in turns on the same batches, round by round."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    cost: float  # seconds until the second ran: a capture, a compilation

    @property
    def ratios(self) -> list[float]:
        return sorted(a / b for a, b in zip(self.before, self.after, strict=True))

    @property
    def gain(self) -> float:
        return statistics.median(self.ratios)

    @property
    def saved(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.before) - statistics.median(self.after)


@dataclass
class Search:
    """Which levers are tried, in which order, and which are kept; it sees timings, not the model."""

    contest: "Trials"
    scene: LeverTarget
    best: Plan
    steps: int | None  # still to run
    budget: float = BUDGET  # seconds for everything but compilations
    step: float = 0.0  # seconds of a step of the best plan
    tell: Callable[[str], None] = lambda words: None
    spent: float = 0.0
    _trials: dict[str, Trial] = field(default_factory=dict)  # by the lever

    @property
    def trials(self) -> list[Trial]:
        return [*self._trials.values()]

    def has_timed(self, lever: Lever) -> bool:
        """Whether a lever has a measured gain."""
        return lever.name in self._trials and self._trials[lever.name].gain is not None

    def run(self, levers: Iterable[Lever] = LEVERS) -> Plan:
        """Try each lever; then those whose gain did not show yet, where another was kept since."""
        later: list[tuple[Lever, Plan | None]] = []
        for lever in levers:
            if self.step > lever.late_above:
                later.append((lever, None))
            elif self._is_slow(lever):
                later.append((lever, self.best))
        for lever, plan in later:
            if plan != self.best:
                self._is_slow(lever)
        return self.best

    def note(self, lever: Lever, verdict: Verdict, why: str, **figures: float) -> None:
        """Keep a trial; a second one of a lever replaces the first only where it is kept."""
        if verdict == "kept":
            self._trials.pop(lever.name, None)
        self._trials.setdefault(lever.name, Trial(lever.name, lever.tier, verdict, why, **figures))

    def _is_slow(self, lever: Lever) -> bool:
        """Try a lever and keep it where it pays; returns whether it was no faster."""
        plan = lever.pull(self.best)
        if why := lever.why_not(self.scene, self.best) or self._unaffordable(lever, plan):
            self.note(lever, "not tried", why)
            return False
        self.tell(lever.name)
        start, compiled = time.perf_counter(), 0.0
        try:
            result = self.contest.compare(self.best, plan)
            compiled = result.cost if "compilation" in lever.cost else 0.0
        except Refused as refusal:
            self.note(lever, "dropped", str(refusal))
            return False
        finally:
            self.spent += time.perf_counter() - start - compiled
        slow = _slowness(lever, result)
        why = slow or self._loss(lever, result)
        if why is None and lever.tier == "B" and lever.changes_gradients:
            why = self.contest.gate(plan)
        ratios, after = result.ratios, statistics.median(result.after)
        figures = {"gain": result.gain, "low": ratios[0], "high": ratios[-1], "step": after, "cost": result.cost}
        self.note(lever, "dropped" if why else "kept", why or lever.what, **figures)
        if why is None:
            self.best, self.step = plan, after
        return slow is not None

    def _loss(self, lever: Lever, result: PlanComparison) -> str | None:
        """Why a lever would lose time over the run; None where it saves some."""
        if self.steps is None or result.gain > lever.harmless_above or result.saved * self.steps >= result.cost:
            return None
        return f"it would save {duration(result.saved * self.steps)} in this run and costs {duration(result.cost)}"

    def _unaffordable(self, lever: Lever, plan: Plan) -> str | None:
        """Why there is no time to try a lever; None where there is."""
        if "compilation" not in lever.cost:
            return "the time for tuning was used up" if self.spent >= self.budget else None
        if self.steps is None:
            return "the length of the run is not known, so that a compilation may not pay back"
        cost, run = expected_seconds(self.scene.model, plan.compile).seconds, self.steps * self.step
        if run * (1 - 1 / (HOPED if lever.cost == "a compilation" else HOPED_LATER)) < cost:
            return f"a compilation of about {duration(cost)} would not pay back in a run of {duration(run)}"
        return None


def _slowness(lever: Lever, result: PlanComparison) -> str | None:
    """Why a lever is no faster; None where it is, or does no harm."""
    slower = sum(ratio <= 1 for ratio in result.ratios)
    if result.gain > lever.harmless_above:
        return None
    if result.gain >= LEAST_GAIN and slower <= MOST_SLOWER * len(result.ratios):
        return None
    return "slower" if result.gain < 1 / LEAST_GAIN else "no gain above the noise"


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


def material_of(loader: Any, device: torch.device, transform: Any) -> Material:
    """The first batches of a loader."""
    if why_not_resident(loader, device) is None and has_known_sampler(loader):
        resident = Resident(loader, device)
        drawn = list(islice(resident.draws(), MOST_STEPS))
        full = [each for each in drawn if _length(each) == _length(drawn[0])]
        material = Material([], loader, resident, full, transform)
        batches = [material.batch(i, resident=True) for i in range(min(BATCHES, len(full)))]
        return replace(material, batches=batches)
    check_readable_again(loader, fix="tune with a DataLoader or a list")
    first = next(iter(loader), None)
    if first is None:
        raise BadArgument("the loader gave no batch to tune with", fix="give a loader that is not empty")
    batch = move(first, device)
    again = loader if is_in_order(loader) and has_known_sampler(loader) else None
    return Material([batch if transform is None else transform(batch)], again, transform=transform)


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

    def __init__(self, space: Scratch, memory: OutOfMemory, material: Material) -> None:
        self.alone = 0.0  # seconds of a plain step without the loader's part
        self.memory = memory
        self._space, self._material, self._gate = space, material, GradientGate(self)
        self._subject, self._device = space.subject, space.subject.device
        self._runners: dict[Plan, _PlanRunner] = {}
        self._plain = self._runner(self._subject.plan)
        self._now = self._plain
        self._number = 0  # of the batch

    def time(self) -> float:
        """Seconds of a step of the plain plan; raises `Refused` where a step changes what cannot be restored."""
        self._space.exchange(self._plain.step)
        self._train(self._plain, 1)
        self._space.rewind()
        if effects := self._space.lasting_changes():
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

    def gate(self, plan: Plan) -> str | None:
        """Why loss and gradient of a plan are not those of the plain one; None where they are."""
        self._rewind()
        batch, plain = self._material.batch(0, resident=False), self._subject.plan
        with self.as_written() as step, without_dropout(self.memory.modules):
            reference = self._gate.gradients(step, batch)
        if isinstance(reference, str):
            return reference
        with self.trying(plan):
            _, why = self._gate.asked(plain, reference, batch)
        return why

    @property
    def step(self) -> TrainingStep:
        """The step of the plan that is tried."""
        return self._now.step

    def as_written(self) -> AbstractContextManager[TrainingStep]:
        """The plain step."""
        return self.trying(self._subject.plan)

    @contextmanager
    def trying(self, plan: Plan) -> Iterator[TrainingStep]:
        """The step of a plan, for a pass or two."""
        before = self._now
        self._exchange(self._runner(plan))
        try:
            yield self._now.step
        finally:
            self._exchange(before)

    def compiled_for(self, plan: Plan) -> dict[str, CompiledObjective] | None:
        """The objectives compiled in the trial of a plan."""
        return (self._runners[plan].step.compiled or None) if plan in self._runners else None

    def forget_captures(self) -> None:
        """Drop CUDA graphs: they hold memory, and may read freed memory after a rewind."""
        for runner in self._runners.values():
            runner.forget_captures()

    def _rewind(self) -> None:
        self.forget_captures()
        self._space.rewind()

    def _runner(self, plan: Plan) -> _PlanRunner:
        if plan not in self._runners:
            self._runners[plan] = _PlanRunner(self._subject.step_for(plan))
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
        self._space.exchange(runner.step)
        if runner is not before and runner.memory is not None:  # a lever may have moved weights or counts of steps
            runner.memory.restore()
        if runner.step.captured is not None:
            runner.step.captured.frozen.check()

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
        self._space.rewind_rng()
        if not slow:
            return taken
        # A GPU computes while the host loads; a CPU does one after the other.
        return self.alone + taken if backend_of(self._device).is_host else max(self.alone, taken)


def _words(error: Exception, plan: Plan) -> str:
    """Why a plan could not be tried."""
    if isinstance(error, Refused):
        return str(error)
    if is_out_of_memory(error):
        return "out of memory while it was tried"
    if isinstance(error, CannotCapture):
        return f"it cannot be captured: {error}"
    what = "the step fails with it" if plan.compile == "off" else "the compiler failed"
    return f"{what}: {error_in_a_line(error)}"


def _steps_for(seconds: float) -> int:
    return max(1, min(200, round(BLOCK / max(seconds, 1e-6))))


def _length(drawn: Any) -> int:
    return len(drawn) if hasattr(drawn, "__len__") else 1
