"""`Course`: what a run goes through until it has its plan, in the order of `docs/tuning.md`, while its steps pass."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hotloop import kernels
from hotloop.levers import LEVERS, Lever, added_levers
from hotloop.levers.base import Delay, RunFacts
from hotloop.levers.compile import remember_seconds
from hotloop.plan import Plan, Trial
from hotloop.printing.text import duration, shorten
from hotloop.step.arithmetic import Work
from hotloop.step.inspection import Inspection, host_objection, signature
from hotloop.tune.first_steps import FirstSteps
from hotloop.tune.gate import Departure, GradientGate, comparison, without_dropout
from hotloop.tune.knowledge import expected_start, has_room, least_trusted, propose
from hotloop.tune.rounding import RoundingGuard
from hotloop.tune.step_timer import StepTimer
from hotloop.tune.tuned_run import Ahead, Steps, TunedRun
from hotloop.tune.tuning_record import TuningRecord

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
HELD_UP = 0.03  # of the rest of a run, for which a compilation or a search may hold it up
FASTER = 1.02  # times, from which on what was compiled or searched for is kept


class Course:
    """The steps to a plan: each `yield` lets a step pass, and gives the batches until it wants to be asked again."""

    def __init__(self, run: TunedRun, first: FirstSteps, record: TuningRecord, listen: Callable[[], None]) -> None:
        """`listen` lets the guard hear of losses from then on."""
        self.gate = GradientGate(run.loop, run.loop.ranks.reason)
        self.guard = RoundingGuard(run, first, self.gate, record, listen)
        self.timer = StepTimer(run)
        self._run, self._loop, self._subject, self._first, self._record = run, run.loop, run.subject, first, record
        self._sleeps = False  # until a new epoch or fit begins
        self._shapes_vary = False  # from batch to batch, on any rank

    def wakes(self) -> bool:
        """Whether it slept, since the run was too short; from now on it is awake."""
        slept, self._sleeps = self._sleeps, False
        return slept

    def whole(self) -> Steps[None]:
        """From the first step on to the plan, and on watch over it."""
        yield 0
        plain = yield from self._first_steps()
        self._adopt(plain)
        self.guard.begin()
        now = yield from self._settled()
        now = yield from self._not_slower(plain, now)
        self._record.timed(now)
        for lever in LEVERS:
            if lever.refines(self._subject.model):
                faster = yield from self._refined(lever, now)
                if faster is not None:
                    now = faster
                    self._record.timed(now)
        yield from self.guard.watched()

    def resumed(self) -> Steps[None]:
        """Of a run that has its plan already."""
        yield 0
        if not self._run.rounding():
            return
        if self._record.key is None:
            ahead = yield from self._run.window()
            batch = ahead.example
            with self._loop.unplanned():
                self._record.key = self._subject.key(batch, ahead.loader, ahead.transform)
        yield from self.guard.watched()

    def gone_back(self, why: str) -> Steps[None]:
        """Back to the person's plan."""
        yield 0
        yield from self._run.switch(self._run.plain_plan, why)

    def _first_steps(self) -> Steps[float]:
        """Steps as they were written: three are watched, two are timed. The seconds of a batch, once a plan pays."""
        run, timed = self._run, self.timer.timed
        is_long = run.next.left is None or run.next.left >= WORTH_PREPARING
        if is_long:
            self._prepare()
        first = yield from timed(1, 0.0)  # in which libraries load and optimizers allocate
        yield from self._worth_it(first / CLEARLY, WATCHED + PLAIN_STEPS)
        if not is_long:  # in the first step, libraries may load for a second
            second = yield from timed(1, 0.0)
            yield from self._worth_it(second / CLEARLY, WATCHED + PLAIN_STEPS)
            self._prepare()
        self._first.watch_steps(WATCHED)
        plain = math.inf
        while self._first.left:
            self._first.note(run.next.batch)
            yield 0
        for _ in range(PLAIN_STEPS):  # the quicker: libraries may still load what they did not need before
            self._first.note(run.next.batch)
            plain = min(plain, (yield from timed(1, 0.0)))
        yield from self._worth_it(plain)
        while not run.next.is_between_windows or run.next.batch is None:
            yield 0
        self._first.note(run.next.batch)
        self._shapes_vary = self._loop.ranks.largest(self._first.vary()) > 0
        return plain

    def _prepare(self) -> None:
        """Start slow preparations beside the first steps."""
        target = self._subject.scene(self._run.next.loader)
        if target.may_be_heavy:  # a small network would wait for kernels that it does not need
            kernels.preload.load_beside(self._subject.device, comparison)
            for lever in LEVERS:
                lever.prepare(target)

    def _worth_it(self, plain: float, before: int = 0) -> Steps[None]:
        """Wait until the run is long enough for a plan that begins after so many batches."""
        while True:
            left, considered_for = self._run.next.left, self._record.considered_for
            if considered_for is None or left is None or left > considered_for:
                if left is None or self._is_worth_it(left, plain, before):
                    return
                self._record.considered_for = left
            self._sleeps = True
            yield math.inf

    def _is_worth_it(self, left: int, plain: float, before: int) -> bool:
        """Whether a plan pays for so many batches; on a CPU no clock decides, so that a run can be repeated."""
        if self._subject.backend.is_host:
            return left >= WORTH_ON_CPU
        start = expected_start(self._subject.scene(self._run.next.loader))
        return (left - before) * plain >= max(WORTH_A_PLAN, start / SAVED)

    def _adopt(self, plain: float) -> None:
        """Adopt the proposed plan, after its levers that change rounding have passed the gate."""
        start = time.perf_counter()
        ahead, loop, subject, record = self._run.next, self._loop, self._subject, self._record
        target = subject.scene(ahead.loader)
        record.considered_for = ahead.left
        names = shorten(list(self._first.effects), 4)
        effect = f"a step changes {names}, which could not be restored" if self._first.effects else None
        if (effect := loop.ranks.reason(effect)) is not None:
            target = replace(target, only=effect)
            self._first.effects.setdefault(effect)
            record.say(f"only what leaves losses and gradients alone is used: {effect}")
        work = Work()
        reference = None
        if target.only is None:
            with without_dropout(subject.modules):
                reference = self.gate.gradients(loop.step, ahead.batch, work, seen := Inspection())
            if (why := self._why_not_captured(seen, ahead.batch)) is not None:
                record.capture_failed(why)
            if (why := loop.ranks.reason(reference if isinstance(reference, str) else None)) is not None:
                target, reference = replace(target, only=why), why
        if not subject.on_ranks:  # what is found on several ranks is not remembered
            record.recall(subject.key(ahead.batch, ahead.loader, ahead.transform))
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
            is_launched=target.on_cuda and (target.on_ranks or record.has_dropped(lambda lever: lever.captures)),
        )
        trials = self._gated(facts, reference, ahead)
        seconds = loop.ranks.largest(time.perf_counter() - start)
        self.guard.note_adoption(seconds)
        record.spend(seconds + self._first.seconds)
        record.adopted(trials, ahead.left)

    def _gated(self, facts: RunFacts, reference: Any, ahead: Ahead) -> list[Trial]:
        """Adopt what the rules propose, without the levers that do not pass the gate; why each is there or not.

        `reference`: losses and gradients as written; a reason or None where the gate is not asked.
        """
        loop, begin, shaken = self._loop, self._subject.plan, dict[str, Departure]()
        while True:
            with loop.unplanned():  # levers ask what form the model has
                plan, trials = propose(facts, begin, self._record.dropped)
            if loop.ranks.size > 1:
                plan = replace(Plan.from_json(loop.ranks.from_first(plan.to_json())), device=begin.device)
            plan = replace(plan, workers=loop.step.plan.workers)
            plan = plan if plan.stream != "direct" else replace(plan, stream="auto")
            loop.carry_out(plan, "it is what suits the model and the device")
            if reference is None or isinstance(reference, str):
                return trials
            guilty, why = self.gate.asked(begin, reference, ahead.batch, shaken)
            if why is None:
                return trials
            for lever in least_trusted(guilty):
                self._record.judge(lever, "dropped", why)

    def _why_not_captured(self, seen: Inspection, batch: Any) -> str | None:
        """Why the step cannot be captured, as far as the gate's pass and a real step tell."""
        if not self._subject.backend.can_capture:
            return None
        if signature(batch) is None:
            return "the form of a batch cannot be compared, as of a sparse or a nested tensor"
        masks = self._record.has_dropped(lambda lever: lever.spares_mask_checks)
        real, gate = (host_objection(each, looks_at_masks=masks) for each in (self._first.on_host, seen))
        return real and gate  # what only one of them did may be the preparation of a library

    def _settled(self) -> Steps[float]:
        """Seconds of a batch after warm-up, captured where the plan says so."""
        for _ in range(CAPTURED_WITHIN):
            captured = self._loop.step.captured
            if captured is None or captured.has_captures:
                break
            yield 0
        for _ in range(SETTLING):  # libraries load kernels when they are first used
            yield 0
        if self._run.plan.graph <= 1:
            now = yield from self.timer.timed(TIMED_STEPS, BRIEFLY)
            if not self._is_short(now):
                return min(now, (yield from self.timer.timed(TIMED_STEPS, TIMED_SECONDS)))
            several = next(lever for lever in LEVERS if lever.for_short_steps)
            yield from self._run.switch(several.pull(self._run.plan), "a captured step is short")
            self._record.judge(several, "kept", f"a captured step takes {now * 1e6:.0f} µs")
        for _ in range(CAPTURED_WITHIN):
            yield 0
            if self._run.next.batches > 1:
                yield 0  # in which the stretch is captured
                break
        return (yield from self.timer.timed(TIMED_STEPS, BRIEFLY))

    def _is_short(self, now: float) -> bool:
        """Whether a captured step of `now` seconds is so short that several belong in one CUDA graph."""
        plan, left = self._run.plan, (self._run.next.left or 0) * now
        is_short = now < SMALL_STEP and (self.timer.host > HOST_LIMITS * now or left > SEVERAL_PAY)
        return plan.graph == 1 and self._run.next.can_be_several and is_short and plan.stream == "resident"

    def _not_slower(self, plain: float, now: float) -> Steps[float]:
        """Drop levers until the step is no slower than the eager one."""
        begin, plan = self._run.plain_plan, self._run.plan
        on_cpu = self._subject.backend.is_host
        is_starved = self._loop.ranks.largest(self.timer.is_starved) > 0
        limit = plain * (SURELY_SLOWER if on_cpu or is_starved else SLOWER)
        # Where shapes vary, each new one may take its time the first time; and other programs disturb.
        for _ in range(AGAIN_ON_CPU if on_cpu else AGAIN):
            if now > limit:
                now = min(now, (yield from self.timer.timed(TIMED_STEPS, TIMED_SECONDS)))
        while now > limit and (pulled := added_levers(plan, begin)):
            doubtful = sorted(pulled, key=lambda each: each.trust)[: math.ceil(len(pulled) / 2)]
            for lever in doubtful:
                self._record.drop_slow(lever, now / plain)
                plan = lever.off(plan)
            yield from self._run.switch(plan, "what was slower is left out")
            if plan != begin:
                now = yield from self._settled()
            else:
                now = yield from self.timer.timed(TIMED_STEPS, TIMED_SECONDS)
        return now

    def _refined(self, lever: Lever, now: float) -> Steps[float | None]:
        """Pull a lever that holds training up, where that may pay; the seconds of a batch with it where it is kept."""
        ahead = yield from self._run.window()
        plan, subject, batch = self._run.plan, self._subject, ahead.example
        target, delay = subject.scene(ahead.loader), None
        why = self._record.dropped.get(lever.name) or lever.why_not(target, plan)
        if why is None and self._first.effects:
            why = "a step has effects that could not be restored"
        if why is None:
            found = lever.delay(target, plan, batch, shapes_vary=self._shapes_vary)
            delay, why = (None, found) if isinstance(found, str) else (found, _would_hold_up(found, ahead, now))
        why = self._loop.ranks.reason(why)
        if why is not None:
            self._record.judge(lever, "not tried", why)
            return None
        assert delay is not None
        new, start = lever.pull(plan), time.perf_counter()
        compiled = self._first.for_all(subject.objectives, new, batch) if lever.computes_the_same else None
        self._loop.carry_out(self._run.with_present_data(new), lever.what, compiled)
        if lever.computes_the_same:
            _, why = self.gate.asked(plan, None, batch)  # in which it is compiled
        took, begun, batches = time.perf_counter() - start, time.perf_counter(), self._run.batches
        self._record.spend(took)
        if why is None and delay.key is not None:
            remember_seconds(delay.key, took)
        then = yield from self._kept(lever, plan, now, why)
        if not lever.computes_the_same:  # what it does, it does in the steps that follow
            trained = (self._run.batches - batches) * (then or now)
            self._record.spend(max(0.0, time.perf_counter() - begun - trained))
        return then

    def _kept(self, lever: Lever, before: Plan, now: float, why: str | None) -> Steps[float | None]:
        """Seconds of a batch with a lever that is carried out; None where it goes: it is no faster, or `why`."""
        slower = math.nan
        if why is None:
            then = yield from self._settled()
            for _ in range(AGAIN):  # the smaller last batch of an epoch is searched for too, when it comes
                if then >= now / FASTER:
                    then = min(then, (yield from self.timer.timed(TIMED_STEPS, TIMED_SECONDS)))
            if then < now / FASTER:
                self._record.judge(lever, "kept", lever.what)
                return then
            slower = then / now
        yield from self._run.switch(before, f"{lever.name} brought nothing")
        if why is None:
            self._record.drop_slow(lever, slower)
        else:
            self._record.judge(lever, "dropped", why)
            self._record.remember()
        return None


def _would_hold_up(delay: Delay, ahead: Ahead, now: float) -> str | None:
    """Why something that blocks training does not pay back; None where it does."""
    if ahead.left is None:
        return f"the length of the run is not known, so that {delay.what} may not pay back"
    left = ahead.left * now
    if delay.seconds <= HELD_UP * left:
        return None
    evidence = f" ({delay.evidence})" if delay.evidence else ""
    about = f"{delay.what} of about {duration(delay.seconds)}{evidence}"
    return f"{about} would hold up a run that takes {duration(left)} more"
