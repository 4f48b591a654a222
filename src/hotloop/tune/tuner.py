"""`Tuner`: gives a run the plan that the rules of the levers propose, and tries it in the run's own steps."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from torch import nn

from hotloop import kernels
from hotloop.data import Stream
from hotloop.device.clock import Clock
from hotloop.errors import LossNotFinite, PlanWarning
from hotloop.levers import LEVERS, NAMED, Lever, added_levers, in_words, without
from hotloop.levers.base import UNCAPTURED, RunFacts
from hotloop.levers.checkpointing import repeated_blocks
from hotloop.levers.compile import CompileBlocksLever, CompileLever
from hotloop.levers.cuda_graph import MOST_STEPS, GraphLever, SeveralStepsLever
from hotloop.levers.cudnn_benchmark import CudnnBenchmarkLever, expected_search
from hotloop.levers.given_masks import GivenMasksLever
from hotloop.levers.workers import WorkersLever
from hotloop.plan import Plan, Trial, Tuning, Verdict
from hotloop.printing.text import duration, error_in_a_line, shorten
from hotloop.step.arithmetic import Work
from hotloop.step.compilation import CompiledObjective, expected_seconds, key_of, remember_seconds
from hotloop.step.inspection import Inspection, host_objection, signature
from hotloop.tune.dropped_levers import DroppedLevers
from hotloop.tune.feeding import NOTABLE_WAIT, Feeding
from hotloop.tune.first_steps import FirstSteps, Reaching
from hotloop.tune.gate import Compared, Departure, GradientGate, comparison, rounding_levers, without_dropout
from hotloop.tune.jumps import RoundingWatch, Sign
from hotloop.tune.knowledge import expected_start, has_room, least_trusted, propose
from hotloop.tune.stopwatch import Stopwatch
from hotloop.tune.subject import Subject, record

T = TypeVar("T")
WORTH_A_PLAN = 0.3  # seconds that a run must still take at least, or its length is not known
SAVED = 0.6  # of the time of eager steps, which a plan saves; it must begin within that
CLEARLY = 1.25  # times what a plan must be worth, before it is known how long steps take that nothing disturbs
WORTH_PREPARING = 100  # batches that must still come, before it is known how long they take
WORTH_ON_CPU = 100  # batches that must still come: what a CPU's plan costs is a few of them, however long they take
WATCHED = 3  # steps with a look at what they change in the person's objects; OOM retry looks at passes then, too
PLAIN_STEPS = 2  # of the eager loop that are timed after those
TIMED_STEPS, TIMED_SECONDS = 5, 0.05  # of a plan, at least
BRIEFLY = 0.01  # seconds that tell whether a step is a short one
AGAIN = 3  # times that a plan which seems to be slower is timed
AGAIN_ON_CPU = 20  # the quickest of 40 steps counts: that other programs disturb all of them is not to be expected
SETTLING = 2  # steps of a new plan before it is timed
CAPTURED_WITHIN = 12  # batches in which a step should have been captured
SLOWER = 1.03  # times the eager step, from which on a plan is taken apart
# The same where two runs of one script are the same to the bit unless a plan is beyond doubt slower, as on a CPU, and
# where the loop waits for its loader, whose pace says nothing of a plan.
SURELY_SLOWER = 1.5
SMALL_STEP = 1e-3  # seconds of a captured step; below, the host may take longer to hand over a batch than the device
HOST_LIMITS = 0.6  # of the time of a captured step, which the host takes to hand one over: the device may wait for it
SEVERAL_PAY = 10.0  # seconds of captured steps, in which 5% for several in a graph pay for capturing these
MOST_PASSES = 8  # forward passes beyond one a step in a run; two more where something seems to have diverged
MANY_BLOCKS = 3  # that a model repeats, from which on one of them is compiled and not the whole
HELD_UP = 0.03  # of the rest of a run, for which a compilation or a search may hold it up
FASTER = 1.02  # times, from which on what was compiled or searched for is kept
AUDIT_SHARE = 0.01  # of the rest of a run, which asking the gate again may take


@dataclass(frozen=True)
class Ahead:
    """The next step, or several in one CUDA graph."""

    loader: Any  # None where the batch was handed to `step`, and no loader gave it
    transform: Any
    batch: Any  # None where several steps go into one graph
    batches: int
    stream: Stream[Any] | None  # the source of the batches
    left: int | None  # batches of the run that are still to come, these included; None where nobody knows
    is_between_windows: bool
    can_be_several: bool  # whether the data lives on the device and `fit` owns the loop
    sample: Callable[[], Any]  # a batch like those of the stretch, taken without a trace

    @property
    def example(self) -> Any:
        """A batch of the run to try something on."""
        return self.sample() if self.batch is None else self.batch


Course = Generator[float, Ahead, T]  # yields how many batches may pass before it is asked again


class Agreeing(Protocol):
    """The ranks of a run, which tune together: a timing or an obstacle of one holds for all."""

    size: int

    def largest(self, number: float) -> float:
        """The maximum over all ranks."""

    def reason(self, words: str | None) -> str | None:
        """The first reason that a rank has; None where none has one."""

    def from_first(self, value: Any) -> Any:
        """The value of rank 0, plain data."""


class Tuned(Compared, Reaching, Protocol):
    """The part of a loop that the tuner uses."""

    by_hand: bool  # whether the plan that is carried out is the person's

    @property
    def ranks(self) -> Agreeing:
        """The ranks that tune with this one."""

    def carry_out(self, plan: Plan, why: str, compiled: dict[str, CompiledObjective] | None = None) -> None:
        """Switch to another plan, with objectives that are compiled already where given."""

    def unplanned(self) -> AbstractContextManager[None]:
        """The model and the optimizers with the levers of the plan reverted."""


class Tuner:
    """Tunes a run while it trains.

    The first steps are eager and in fp32. Three of them are watched: where the person's code changes something that
    could not be restored, such as a counter in a closure, nothing is computed twice and only what leaves losses and
    gradients alone is used. Then the plan that the rules of the levers propose is adopted whole. What rounds passes the
    gate first: loss and gradient of the next batch, both ways. From then on real steps are timed; a plan that is slower
    than the eager step is taken apart. For as long as something rounds, losses and norms of the gradient are watched:
    where they jump, the gate is asked again; where a loss is not finite before it has reached a weight, its batch is
    repeated in fp32.
    """

    def __init__(
        self, subject: Subject, loop: Tuned, *, asked: bool, listen: Callable[[Callable[[float], None]], None]
    ) -> None:
        """`listen` makes a function hear of each loss that reaches the host."""
        self.tuning: Tuning | None = None  # how the present plan was found
        self.seconds = 0.0  # that were not spent in training steps
        self.say: Callable[[str], None] = lambda words: None  # of a fit that is running
        self.subject = subject
        self.first = FirstSteps(subject, loop)
        self.considered_for: int | None = None  # batches that were left when it was decided whether to plan anything
        self.due: float = 0 if asked else math.inf  # the batch from which on it wants to be asked before steps
        self._course_due: float = 0  # the batch before which the course goes on
        self._loop, self._listen = loop, listen
        self._course = self._tuned()
        self._sleeps = False  # until a new epoch or fit begins
        self._has_begun = False
        self._ahead: Ahead | None = None
        self._done = 0  # batches
        self._adopted_at: int | None = None  # batches after which this run has adopted a plan
        self._stopwatch = Stopwatch(subject.device)
        self._shapes_vary = False  # from batch to batch, on any rank
        self._feeding = Feeding()
        self._is_starved = False  # whether the loop waited for its loader while it was timed last
        self._watch: RoundingWatch | None = None  # while a lever rounds
        self._key: str | None = None  # under which what is found is remembered
        self._gate = GradientGate(loop, loop.ranks.reason)
        self._comparison = 0.0  # seconds that the first one with fp32 took
        self._found: dict[str, tuple[Verdict, str]] = {}  # of levers, beyond what the rules say, and why

    @property
    def passes(self) -> int:
        """Extra forward passes so far, beyond one per step."""
        return self._gate.passes

    def resume(self, tuning: Tuning | None, considered_for: int | None) -> None:
        """Load what an earlier part of this run found: its plan, or that none pays in `considered_for` batches."""
        self.considered_for = considered_for
        if tuning is not None:
            self.tuning = tuning
            self._only_watch()

    @contextmanager
    def telling(self, say: Callable[[str], None]) -> Iterator[None]:
        """Say what is found by this while a fit runs."""
        before, self.say = self.say, say
        try:
            yield
        finally:
            self.say = before

    def begin(self) -> None:
        """Consider tuning again at a new epoch or fit, where the run was too short so far."""
        if self._sleeps:
            self._sleeps, self.due, self._course_due = False, 0, 0

    def pause(self) -> None:
        """Stop the stopwatch while training pauses, as for an evaluation."""
        self._stopwatch.halt()

    def before(self, ahead: Ahead, done: int) -> None:
        """Call before a step, or several in one graph, after `done` batches."""
        self._ahead, self._done = ahead, done
        try:
            if self._watch is not None and self._watch.before(done):
                self._course_due = 0
            self._go_on()
            self._feed()
        except Exception as error:
            if self._loop.ranks.size > 1:  # the others wait for this rank in the course that they are on
                raise
            self._fail(error)
            self._go_on()
        looks = math.inf if self._watch is None else self._watch.due
        feeds = self._feeding.is_open and ahead.loader is not None
        self.due = min(self._course_due, looks, done + 1 if feeds else math.inf)

    def tune(self, loader: Any, transform: Any, *, steps: int | None, seconds: float | None, tell: Any) -> Tuning:
        """Tune now, lever by lever, compilations included."""
        from hotloop.tune.trial import tune

        memory = self._loop.memory
        with self._loop.unplanned():
            found = tune(self.subject, memory, loader, transform, steps=steps, seconds=seconds, tell=tell)
            tuning, compiled, batch = found
            self._key = self.subject.key(batch, loader, transform)  # of the optimizers as they were given
        self.tuning = tuning
        self._loop.carry_out(tuning.plan, "it was found to be faster", compiled)
        self._only_watch()
        self._remember()
        return tuning

    def _go_on(self) -> None:
        if self._done < self._course_due:
            return
        try:
            if not self._has_begun:
                self._has_begun = True
                next(self._course)
            self._course_due = self._done + self._course.send(self._next)
        except StopIteration:
            self._course_due = math.inf

    def _fail(self, error: Exception) -> None:
        """End the tuning after an error of its own, and go back to the person's plan: the training goes on."""
        words = f"tuning has failed ({error_in_a_line(error)})"
        warnings.warn(
            f'{words}; the run goes on as you wrote it. fix: plan="plain" tunes nothing; please report this',
            PlanWarning,
            stacklevel=2,
        )
        self._feeding.is_open, self.first.left, self._watch, self._key = False, 0, None, None
        for lever in LEVERS:
            if lever.name not in self._dropped:
                self._found[lever.name] = "dropped", words
        trials = [Trial(lever.name, lever.tier, *self._found[lever.name]) for lever in LEVERS]
        self.tuning = record(self.subject, self.subject.plan, trials, None, None, self.considered_for, self.seconds)
        self._course, self._has_begun, self._course_due = self._gone_back(words), False, 0

    def _gone_back(self, why: str) -> "Course[None]":
        """Return to the person's plan, at the end of a window."""
        yield 0
        yield from self._carry_out(self._plain_plan, why)

    def _only_watch(self) -> None:
        """Tune no more, since the plan was found elsewhere; watch the levers that change rounding."""
        self._course, self._has_begun = self._resumed(), False
        self._feeding.is_open, self._watch, self._adopted_at = False, None, None
        self.due = self._course_due = 0

    def _feed(self) -> None:
        """Give the loader more workers where the training waits for it."""
        stream, plan = self._next.stream, self._loop.step.plan
        if stream is not None and (stream.resident is not None or self.subject.plan.workers is not None):
            self._feeding.is_open = False
        if stream is None or not self._feeding.is_open or self._next.loader is None:
            return
        advice = self._feeding.advice(stream, self._next.left)
        if advice is None:
            return
        if advice.number > stream.workers and stream.why_workers_stay is None:
            number = stream.change_workers(advice.number, advice.prefetch_factor)
            self._loop.carry_out(replace(plan, workers=number), advice.why)
            self.say(advice.why)
        self._judge(WorkersLever.name, "kept" if self._loop.step.plan.workers else "not tried", advice.why)

    def refused(self, why: str) -> None:
        """Drop the levers for captures: the step cannot be captured as a CUDA graph."""
        self._judge(GraphLever.name, "dropped", why)
        for lever in LEVERS:
            if lever.for_captures:
                self._judge(lever.name, "dropped", UNCAPTURED)

    # Levers that change rounding, while it trains

    def heard(self, loss: float) -> None:
        """Take in a recent loss that has reached the host."""
        if self._watch is not None and self._watch.heard(loss):
            self.due = self._course_due = 0

    def rescued(self, run: Callable[[Any], T], batch: Any) -> T:
        """Run a step; where its loss is not finite and has not reached a weight, repeat the batch in fp32.

        A loss that is not finite in fp32 either raises `LossNotFinite`.
        """
        try:
            return run(batch)
        except LossNotFinite:
            old, rounding, memory = self._loop.step, self._rounding(), self._loop.memory
            if not rounding or self._loop.ranks.size > 1:  # other ranks do not repeat theirs
                raise
            memory.snapshot.restore()
            if not all(buffer.isfinite().all() for module in memory.modules for buffer in module.buffers()):
                raise  # a pass that was looked at closely no longer holds their old values
        self._loop.carry_out(without(rounding, old.plan), "the loss was not finite")
        for before, now in zip(old.eagers, self._loop.step.eagers, strict=True):
            now.window = before.window  # of which the gradients are there
        parts: Any = self._loop.step.run(batch)
        self._gate.passes += 1
        self._forgo(rounding, "the loss is not finite with it, and is in fp32")
        return parts  # type: ignore[no-any-return]

    def _rounding(self) -> Sequence[Lever]:
        """Levers that round losses and gradients, which the tuner and not the person has pulled."""
        return () if self._loop.by_hand else rounding_levers(self._loop.step.plan, self._plain_plan)

    def _forgo(self, levers: Sequence[Lever], why: str) -> None:
        """Drop these levers for this run and, by the cache, for later ones."""
        for lever in levers:
            self._judge(lever.name, "dropped", why)
        if is_plain := not self._rounding():
            self._watch = None
        if self.tuning is not None:  # how fast it is now was not measured
            self.tuning = replace(self.tuning, plan=self._loop.step.plan, step=None)
            self._remember()
        words = "back to fp32" if is_plain else f"without {', '.join(lever.name for lever in levers)}"
        self.say(f"{words} after {self._loop.step.counts.steps} steps: {why}")

    def _remember(self) -> None:
        """Keep what did not work for later runs of the model."""
        if self._key is not None and self.tuning is not None:
            dropped = {trial.lever: trial.why for trial in self.tuning.trials if trial.verdict == "dropped"}
            DroppedLevers().put(self._key, dropped)

    def _start_watching(self) -> None:
        self._listen(self.heard)
        self._watch = RoundingWatch(self._loop, self._adopted_at, self._done, alone=self._loop.ranks.size == 1)

    # The course of it: each `yield` lets a step pass, and gives the number of batches until it wants to be asked again

    def _tuned(self) -> "Course[None]":
        yield 0
        plain = yield from self._first_steps()
        self._adopt(plain)
        if self._rounding():
            self._start_watching()
        now = yield from self._settled()
        now = yield from self._not_slower(plain, now)
        self._note(now)
        for refine in (self._searched, self._compiled):
            faster = yield from refine(now)
            if faster is not None:
                now = faster
                self._note(now)
        yield from self._watched_over()

    def _first_steps(self) -> "Course[float]":
        """Steps as they were written: three are watched, two are timed. The seconds of a batch, once a plan pays."""
        is_long = self._next.left is None or self._next.left >= WORTH_PREPARING
        if is_long:
            self._prepare()
        first = yield from self._timed(1, 0.0)  # in which libraries load and optimizers allocate
        yield from self._worth_it(first / CLEARLY, WATCHED + PLAIN_STEPS)
        if not is_long:  # in the first step, libraries may load for a second
            second = yield from self._timed(1, 0.0)
            yield from self._worth_it(second / CLEARLY, WATCHED + PLAIN_STEPS)
            self._prepare()
        self.first.left, plain = WATCHED, math.inf
        while self.first.left:
            self.first.note(self._next.batch)
            yield 0
        for _ in range(PLAIN_STEPS):  # the quicker: libraries may still load what they did not need before
            self.first.note(self._next.batch)
            plain = min(plain, (yield from self._timed(1, 0.0)))
        yield from self._worth_it(plain)
        while not self._next.is_between_windows or self._next.batch is None:
            yield 0
        self.first.note(self._next.batch)
        self._shapes_vary = self._loop.ranks.largest(self.first.vary()) > 0
        return plain

    def _prepare(self) -> None:
        """Start slow preparations beside the first steps."""
        target = self.subject.scene(self._next.loader)
        if target.may_be_heavy:  # a small network would wait for kernels that it does not need
            kernels.preload.load_beside(self.subject.device, comparison)
            for lever in LEVERS:
                lever.prepare(target)

    def _resumed(self) -> "Course[None]":
        """The course of a run that has its plan already."""
        yield 0
        if not self._rounding():
            return
        if self._key is None:
            ahead = yield from self._window()
            batch = ahead.example
            with self._loop.unplanned():
                self._key = self.subject.key(batch, ahead.loader, ahead.transform)
        yield from self._watched_over()

    def _watched_over(self) -> "Course[None]":
        """Repeat the gate, when due or on a sign, for as long as a lever changes rounding."""
        if self._watch is None:
            self._start_watching()
        while (watch := self._watch) is not None and self._rounding() and self._may_ask(has_sign=True):
            if watch.sign is None:
                yield max(1, watch.audit - self._done)
            if (sign := watch.reason(self._done)) is not None:
                yield from self._audited(sign)
        self._watch = None

    def _may_ask(self, *, has_sign: bool) -> bool:
        """Whether a comparison with fp32 stays within the run's limit of extra forward passes."""
        cost = 2 * len(self.subject.objectives)
        if self.first.effects:
            return False
        return self._loop.ranks.largest(self._gate.passes) + cost <= MOST_PASSES + (cost if has_sign else 0)

    def _worth_it(self, plain: float, before: int = 0) -> "Course[None]":
        """Wait until the run is long enough for a plan that begins after so many batches."""
        while True:
            left = self._next.left
            if self.considered_for is None or left is None or left > self.considered_for:
                if left is None or self._is_worth_it(left, plain, before):
                    return
                self.considered_for = left
            self._sleeps = True
            yield math.inf

    def _is_worth_it(self, left: int, plain: float, before: int) -> bool:
        """Whether a plan pays for so many batches; on a CPU no clock decides, so that a run can be repeated."""
        if self.subject.backend.is_host:
            return left >= WORTH_ON_CPU
        start = expected_start(self.subject.scene(self._next.loader))
        return (left - before) * plain >= max(WORTH_A_PLAN, start / SAVED)

    def _adopt(self, plain: float) -> None:
        """Adopt the proposed plan, after its levers that change rounding have passed the gate."""
        start = time.perf_counter()
        ahead, loop, subject = self._next, self._loop, self.subject
        target, begin = subject.scene(ahead.loader), subject.plan
        self.considered_for, self._adopted_at = ahead.left, self._done
        names = shorten(list(self.first.effects), 4)
        effect = f"a step changes {names}, which could not be restored" if self.first.effects else None
        if (effect := loop.ranks.reason(effect)) is not None:
            target = replace(target, only=effect)
            self.first.effects.setdefault(effect)
            self.say(f"only what leaves losses and gradients alone is used: {effect}")
        work = Work()
        reference, shaken = None, dict[str, Departure]()
        if target.only is None:
            with without_dropout(subject.modules):
                reference = self._gate.gradients(loop.step, ahead.batch, work, seen := Inspection())
            if (why := self._why_not_captured(seen, ahead.batch)) is not None:
                self.refused(why)
            if (why := loop.ranks.reason(reference if isinstance(reference, str) else None)) is not None:
                target, reference = replace(target, only=why), why
        if not subject.on_ranks:  # what is found on several ranks is not remembered
            self._key = subject.key(ahead.batch, ahead.loader, ahead.transform)
            self._found |= {lever: ("dropped", why) for lever, why in DroppedLevers().get(self._key).items()}
        facts = RunFacts(
            target,
            flops=work.flops,
            operations=work.operations,
            attends=work.attends,
            row_sums=work.row_sums,
            step=plain,
            left=None if ahead.left is None else ahead.left * plain,
            has_room=has_room(subject.device),
            shapes_vary=self._shapes_vary,
            can_be_several=ahead.can_be_several,
            is_launched=target.on_cuda and (target.on_ranks or GraphLever.name in self._dropped),
        )
        while True:
            with loop.unplanned():  # levers ask what form the model has
                plan, trials = propose(facts, begin, self._dropped)
            if loop.ranks.size > 1:
                plan = replace(Plan.from_json(loop.ranks.from_first(plan.to_json())), device=begin.device)
            plan = replace(plan, workers=loop.step.plan.workers)
            plan = plan if plan.stream != "direct" else replace(plan, stream="auto")
            loop.carry_out(plan, "it is what suits the model and the device")
            if reference is None or isinstance(reference, str):
                break
            guilty, why = self._gate.asked(begin, reference, ahead.batch, shaken)
            if why is None:
                break
            for lever in least_trusted(guilty):
                self._judge(lever.name, "dropped", why)
        self._comparison = loop.ranks.largest(time.perf_counter() - start)
        self.seconds += self._comparison + self.first.seconds
        self.tuning = record(subject, loop.step.plan, trials, None, None, ahead.left, self.seconds)
        for name, found in [*self._found.items()]:  # such as the workers, which were changed before
            self._judge(name, *found)

    def _why_not_captured(self, seen: Inspection, batch: Any) -> str | None:
        """Why the step cannot be captured, as far as the gate's pass and a real step tell."""
        if not self.subject.backend.can_capture:
            return None
        if signature(batch) is None:
            return "the form of a batch cannot be compared, as of a sparse or a nested tensor"
        masks = GivenMasksLever.name in self._dropped
        real, gate = (host_objection(each, looks_at_masks=masks) for each in (self.first.on_host, seen))
        return real and gate  # what only one of them did may be the preparation of a library

    def _settled(self) -> "Course[float]":
        """Seconds of a batch after warm-up, captured where the plan says so."""
        for _ in range(CAPTURED_WITHIN):
            captured = self._loop.step.captured
            if captured is None or captured.has_captures:
                break
            yield 0
        for _ in range(SETTLING):  # libraries load kernels when they are first used
            yield 0
        if self._loop.step.plan.graph <= 1:
            now = yield from self._timed(TIMED_STEPS, BRIEFLY)
            if not self._is_short(now):
                return min(now, (yield from self._timed(TIMED_STEPS, TIMED_SECONDS)))
            plan = replace(self._loop.step.plan, graph=MOST_STEPS)
            yield from self._carry_out(plan, "a captured step is short")
            self._judge(SeveralStepsLever.name, "kept", f"a captured step takes {now * 1e6:.0f} µs")
        for _ in range(CAPTURED_WITHIN):
            yield 0
            if self._next.batches > 1:
                yield 0  # in which the stretch is captured
                break
        return (yield from self._timed(TIMED_STEPS, BRIEFLY))

    def _is_short(self, now: float) -> bool:
        """Whether a captured step of `now` seconds is so short that several belong in one CUDA graph."""
        plan, left = self._loop.step.plan, (self._next.left or 0) * now
        is_short = now < SMALL_STEP and (self._stopwatch.host > HOST_LIMITS * now or left > SEVERAL_PAY)
        return plan.graph == 1 and self._next.can_be_several and is_short and plan.stream == "resident"

    def _not_slower(self, plain: float, now: float) -> "Course[float]":
        """Drop levers until the step is no slower than the eager one."""
        begin, plan = self._plain_plan, self._loop.step.plan
        on_cpu = self.subject.backend.is_host
        is_starved = self._loop.ranks.largest(self._is_starved) > 0
        limit = plain * (SURELY_SLOWER if on_cpu or is_starved else SLOWER)
        # Where shapes vary, each new one may take its time the first time; and other programs disturb.
        for _ in range(AGAIN_ON_CPU if on_cpu else AGAIN):
            if now > limit:
                now = min(now, (yield from self._timed(TIMED_STEPS, TIMED_SECONDS)))
        while now > limit and (pulled := added_levers(plan, begin)):
            doubtful = sorted(pulled, key=lambda each: each.trust)[: math.ceil(len(pulled) / 2)]
            for lever in doubtful:
                self._judge(lever.name, "dropped", _slowness(now / plain))
                plan = lever.off(plan)
            yield from self._carry_out(plan, "what was slower is left out")
            now = yield from self._settled() if plan != begin else self._timed(TIMED_STEPS, TIMED_SECONDS)
        return now

    def _audited(self, sign: Sign) -> "Course[None]":
        """Ask the gate again, and drop levers until it passes, the least trusted first."""
        ahead = yield from self._window()
        has_sign = bool(sign.words)
        if not self._may_ask(has_sign=has_sign) or (not has_sign and self._costs_too_much(ahead)):
            return
        clock = Clock(self.subject.device)  # of the device: steps may be queued that it has not begun
        batch, is_dropped = ahead.example, False
        with without_dropout(self.subject.modules), self._loop.as_written() as step:
            plain = self._gate.gradients(step, batch)
        while rounding := self._rounding():
            why = self._loop.ranks.reason(self._departure(plain, batch, sign))
            if why is None:
                break
            doubtful = least_trusted(rounding) if self._may_ask(has_sign=has_sign) else rounding
            self._loop.carry_out(without(doubtful, self._loop.step.plan), why)
            self._forgo(doubtful, why)
            is_dropped = True
        self.seconds += clock.seconds()
        if is_dropped and rounding:
            self._start_watching()

    def _departure(self, plain: Any, batch: Any, sign: Sign) -> str | None:
        """Why the present plan has departed from fp32; None where it has not, or where nothing is told."""
        with without_dropout(self.subject.modules):
            other = self._gate.gradients(self._loop.step, batch)
            # There is no room, the person's code has failed, or fp32 does no better.
            failed = isinstance(plain, str) or isinstance(other, str)
            if failed or not all(loss.isfinite().all() for loss in plain[0].values()):
                return None
            if Departure.between(plain, other).has_jumped_too(sign.usual):
                return None
            why = self._gate.excess(plain, other, batch, later=True)
        return why if why is None or not sign.words else f"{sign.words}, and {why}"

    def _searched(self, now: float) -> "Course[float | None]":
        """Let cuDNN search its algorithms where that may pay back; returns the seconds of a batch then."""
        lever, plan = NAMED[CudnnBenchmarkLever.name], self._loop.step.plan
        ahead = yield from self._window()
        why = self._dropped.get(lever.name) or lever.why_not(self.subject.scene(ahead.loader), plan)
        why = self._loop.ranks.reason(why or self._not_worth_searching(plan, ahead, now))
        if why is not None:
            self._judge(lever.name, "not tried", why)
            return None
        start, done = time.perf_counter(), self._done
        self._loop.carry_out(self._now(lever.pull(plan)), lever.what)
        then = yield from self._kept(lever, plan, now)
        self.seconds += max(0.0, time.perf_counter() - start - (self._done - done) * (then or now))
        return then

    def _kept(self, lever: Lever, before: Plan, now: float, why: str | None = None) -> "Course[float | None]":
        """Seconds of a batch with a lever that is carried out; None where it goes: it is no faster, or `why`."""
        if why is None:
            then = yield from self._settled()
            for _ in range(AGAIN):  # the smaller last batch of an epoch is searched for too, when it comes
                if then >= now / FASTER:
                    then = min(then, (yield from self._timed(TIMED_STEPS, TIMED_SECONDS)))
            if then < now / FASTER:
                self._judge(lever.name, "kept", lever.what)
                return then
            why = _slowness(then / now)
        yield from self._carry_out(before, f"{lever.name} brought nothing")
        self._judge(lever.name, "dropped", why)
        self._remember()
        return None

    def _not_worth_searching(self, plan: Plan, ahead: Ahead, now: float) -> str | None:
        """Why a search of cuDNN's algorithms does not pay; None where it may."""
        if self.first.effects:
            return "a step has effects that could not be restored"
        if plan.precision == "fp32":
            return "in fp32 the algorithms of the first steps stay"
        if self._shapes_vary:
            return "each new shape would be searched for"
        if not (seconds := expected_search(self.subject.model)):
            return "its convolutions only cut images into patches"
        return _would_hold_up("a search", seconds, ahead, now)

    def _compiled(self, now: float) -> "Course[float | None]":
        """Compile where that may pay back; returns the seconds of a batch then."""
        ahead = yield from self._window()
        plan, subject, batch = self._loop.step.plan, self.subject, ahead.example
        target = subject.scene(ahead.loader)
        kind = CompileBlocksLever if _repeats_one(repeated_blocks(subject.model)) else CompileLever
        lever = NAMED[kind.name]
        why = self._dropped.get(lever.name) or lever.why_not(target, plan)
        if self.first.effects:
            why = "a step has effects that could not be restored"
        elif why is None:
            key = key_of(subject.model, batch, lever.pull(plan))
            guess = expected_seconds(subject.model, lever.pull(plan).compile, key)
            why = _would_hold_up("a compilation", guess.seconds, ahead, now, guess.evidence)
        if why is not None:
            self._judge(lever.name, "not tried", why)
            return None
        start, new = time.perf_counter(), lever.pull(plan)
        self._loop.carry_out(self._now(new), "it is compiled", self.first.for_all(subject.objectives, new, batch))
        _, why = self._gate.asked(plan, None, batch)  # in which it is compiled
        self.seconds += (took := time.perf_counter() - start)
        if why is None:
            remember_seconds(key, took)
        return (yield from self._kept(lever, plan, now, why))

    def _costs_too_much(self, ahead: Ahead) -> bool:
        """Whether repeating the gate would take more than `AUDIT_SHARE` of the rest of the run."""
        pace = None if self.tuning is None else self.tuning.step
        return ahead.left is not None and pace is not None and self._comparison > AUDIT_SHARE * ahead.left * pace

    # Parts of it

    def _timed(self, steps: int, seconds: float) -> "Course[float]":
        """Seconds of a batch over the next steps, synchronized at both ends.

        On a CPU, those of the quickest of a few steps: other programs disturb some.
        """
        if self.subject.backend.is_host:
            quickest = math.inf
            for _ in range(min(steps, PLAIN_STEPS)):
                watch = self._stopwatch = Stopwatch(self.subject.device)
                watch.begin()
                yield 0
                watch.halt()
                quickest = min(quickest, watch.seconds)
            return self._loop.ranks.largest(quickest)
        watch = self._stopwatch = Stopwatch(self.subject.device)
        began, waited = time.perf_counter(), self._waited
        cycle = math.lcm(*(each.every for each in self.subject.objectives))  # batches that train all of them
        goal = steps * cycle
        while watch.batches < goal or watch.seconds < seconds:
            while watch.batches < goal:
                ahead = self._next
                is_idle = watch.begin()
                yield 0
                watch.batches += ahead.batches
                if is_idle:
                    watch.note_host(ahead.batches)
            watch.halt()
            watch.seconds = self._loop.ranks.largest(watch.seconds)
            rest = seconds - watch.seconds
            goal = watch.batches + cycle * max(0, math.ceil(rest / max(watch.seconds / watch.batches, 1e-6) / cycle))
        self._is_starved = self._waited - waited > NOTABLE_WAIT * (time.perf_counter() - began)
        return watch.seconds / watch.batches

    @property
    def _waited(self) -> float:
        """Seconds that the loop has waited for the loader."""
        return 0.0 if self._next.stream is None else self._next.stream.waited

    def _window(self) -> "Course[Ahead]":
        """Let steps pass up to the end of an accumulation window."""
        while not self._next.is_between_windows:
            yield 0
        return self._next

    def _carry_out(self, plan: Plan, why: str) -> "Course[None]":
        """Switch to a plan at the end of a window; stream and workers stay those of now."""
        yield from self._window()
        self._loop.carry_out(self._now(plan), why)

    def _now(self, plan: Plan) -> Plan:
        """A plan with the present stream and workers, and without levers dropped since it was made."""
        now = self._loop.step.plan
        gone = [lever for lever in added_levers(plan, self.subject.plan) if lever.name in self._dropped]
        return replace(without(gone, plan), stream=now.stream, pinned=now.pinned, workers=now.workers)

    @property
    def _next(self) -> Ahead:
        assert self._ahead is not None
        return self._ahead

    @property
    def _plain_plan(self) -> Plan:
        """The person's plan with the present stream and workers."""
        return self._now(self.subject.plan)

    @property
    def _dropped(self) -> dict[str, str]:
        """The levers that did not work here, and why."""
        return {lever: why for lever, (verdict, why) in self._found.items() if verdict == "dropped"}

    def _judge(self, lever: str, verdict: Verdict, why: str) -> None:
        """Record what has become of a lever."""
        self._found[lever] = verdict, why
        if self.tuning is not None:
            trials = [replace(t, verdict=verdict, why=why) if t.lever == lever else t for t in self.tuning.trials]
            self.tuning = replace(self.tuning, trials=tuple(trials), plan=self._loop.step.plan)

    def _note(self, now: float) -> None:
        """Record the plan in use. Single steps have decided, and give no figure of what it gains."""
        assert self.tuning is not None
        self.tuning = replace(self.tuning, plan=self._loop.step.plan, step=now, seconds=self.seconds)
        self._remember()
        self._tell()

    def _tell(self) -> None:
        """Say in a line which plan the run has."""
        if kept := ", ".join(in_words(self._loop.step.plan)):
            self.say(f'the plan: {kept}; plan="plain" for fp32 eager')


def _would_hold_up(what: str, seconds: float, ahead: Ahead, now: float, evidence: str = "") -> str | None:
    """Why something that blocks training does not pay back; None where it does."""
    if ahead.left is None:
        return f"the length of the run is not known, so that {what} may not pay back"
    left = ahead.left * now
    if seconds <= HELD_UP * left:
        return None
    known = f" ({evidence})" if evidence else ""
    return f"{what} of about {duration(seconds)}{known} would hold up a run that takes {duration(left)} more"


def _slowness(ratio: float) -> str:
    """Why a lever is dropped, by the time of a step with it and without it."""
    if round(ratio, 2) == 1:
        return "with it a step took as long as without it"
    return f"with it a step took {ratio:.3g} times as long"


def _repeats_one(blocks: Sequence[nn.Module]) -> bool:
    """Whether most blocks of a model have one shape, so that one compilation serves them."""
    shapes = Counter((type(each), tuple(p.shape for p in each.parameters())) for each in blocks)
    return bool(shapes) and max(shapes.values()) >= max(MANY_BLOCKS, 0.75 * len(blocks))
