"""`Tuner`: gives a run the plan that the rules of the levers propose, and tries it in the run's own steps."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hotloop.errors import PlanWarning
from hotloop.levers import LEVERS
from hotloop.plan import Tuning
from hotloop.printing.text import error_in_a_line
from hotloop.tune.feeding import Feeding
from hotloop.tune.first_steps import FirstSteps
from hotloop.tune.subject import Subject
from hotloop.tune.tuned_run import Ahead, Steps, Tuned, TunedRun
from hotloop.tune.tuning_record import TuningRecord

if TYPE_CHECKING:
    from hotloop.tune.course import Course
    from hotloop.tune.rounding import RoundingGuard


class Tuner:
    """Tunes a run while it trains.

    The first steps are eager and in fp32. Three of them are watched: where the person's code changes something that
    could not be restored, such as a counter in a closure, nothing is computed twice and only what leaves losses and
    gradients alone is used. Then the plan that the rules of the levers propose is adopted whole. What rounds passes the
    gate first: loss and gradient of the next batch, both ways. From then on real steps are timed; a plan that is slower
    than the eager step is taken apart. `Course` tells all of that in its order; `RoundingGuard` goes on for as long as
    something rounds, and `TuningRecord` has what was found.
    """

    def __init__(
        self, subject: Subject, loop: Tuned, *, asked: bool, listen: Callable[[Callable[[float], None]], None]
    ) -> None:
        """`listen` makes a function hear of each loss that reaches the host."""
        self.record = TuningRecord(subject, loop)
        self.first = FirstSteps(subject, loop)
        self.due: float = 0 if asked else math.inf  # the batch from which on it wants to be asked before steps
        self._run = TunedRun(subject, loop, self.record)
        self._listen = partial(listen, self._on_loss)
        self._feeding = Feeding()
        self._course: Course | None = None
        self._course_due = math.inf
        if asked:
            self._go_through(self.course.whole())

    @property
    def course(self) -> "Course":
        """The way to a plan; made and imported by the run that looks for one."""
        if self._course is None:
            from hotloop.tune.course import Course

            self._course = Course(self._run, self.first, self.record, self._listen)
        return self._course

    @property
    def guard(self) -> "RoundingGuard":
        """The watch over a plan that rounds."""
        return self.course.guard

    def _go_through(self, course: Steps[None]) -> None:
        """Go through a course from the next step on."""
        next(course)
        self._steps, self._course_due = course, 0.0  # the batch before which the course goes on

    @property
    def passes(self) -> int:
        """Extra forward passes so far, beyond one per step."""
        return self.course.gate.passes

    def resume(self, tuning: Tuning | None, considered_for: int | None) -> None:
        """Load what an earlier part of this run found: its plan, or that none pays in `considered_for` batches."""
        self.record.resume(tuning, considered_for)
        if tuning is not None:
            self._only_watch()

    def restorer(self) -> Callable[[], None]:
        """A callable that undoes what `resume` changes."""
        changed = [self, self.record, self._feeding, *([] if self._course is None else [self.guard])]
        before = [(each, dict(vars(each))) for each in changed]

        def restore() -> None:
            for each, values in before:
                vars(each).update(values)

        return restore

    def begin(self) -> None:
        """Consider tuning again at a new epoch or fit, where the run was too short so far."""
        if self._course is not None and self._course.wakes():
            self._ask_next()

    def pause(self) -> None:
        """Stop the clock while training pauses, as for an evaluation."""
        if self._course is not None:
            self._course.timer.pause()

    def before(self, ahead: Ahead, done: int) -> None:
        """Call before a step, or several in one graph, after `done` batches."""
        self._run.before(ahead, done)
        try:
            if self.guard.has_norm_spiked():
                self._course_due = 0
            self._go_on()
            self._feed()
        except Exception as error:
            if self._run.loop.ranks.size > 1:  # the others wait for this rank in the course that they are on
                raise
            self._fail(error)
            self._go_on()
        feeds = self._feeding.is_open and ahead.loader is not None
        self.due = min(self._course_due, self.guard.due, done + 1 if feeds else math.inf)

    def _on_loss(self, loss: float) -> None:
        """Note a recent loss that has reached the host."""
        if self.guard.has_loss_spiked(loss):
            self._ask_next()

    def tune(self, loader: Any, transform: Any, *, steps: int | None, seconds: float | None, tell: Any) -> Tuning:
        """Tune now, lever by lever, compilations included."""
        from hotloop.tune.trial import tune

        subject, loop = self._run.subject, self._run.loop
        with loop.unplanned():
            tuning, compiled = tune(subject, loop.memory, loader, transform, steps=steps, seconds=seconds, tell=tell)
        self.record.tuned(tuning)
        loop.carry_out(tuning.plan, "it was found to be faster", compiled)
        self._only_watch()
        return tuning

    def _ask_next(self) -> None:
        self.due = self._course_due = 0

    def _go_on(self) -> None:
        if self._run.batches < self._course_due:
            return
        try:
            self._course_due = self._run.batches + self._steps.send(self._run.next)
        except StopIteration:
            self._course_due = math.inf

    def _only_watch(self) -> None:
        """Tune no more, since the plan was found elsewhere; watch the levers that change rounding."""
        self._feeding.end()
        self.guard.forget()
        self._go_through(self.course.resumed())
        self._ask_next()

    def _fail(self, error: Exception) -> None:
        """End the tuning after an error of its own, and go back to the person's plan: the training goes on."""
        words = f"tuning has failed ({error_in_a_line(error)})"
        warnings.warn(
            f'{words}; the run goes on as you wrote it. fix: plan="plain" tunes nothing; please report this',
            PlanWarning,
            stacklevel=2,
        )
        self._feeding.end()
        self.first.watch_steps(0)
        self.guard.end()
        self.record.failed(words)
        self._go_through(self.course.gone_back(words))

    def _feed(self) -> None:
        """Give the loader more workers where the training waits for it."""
        loop, ahead = self._run.loop, self._run.next
        stream, plan = ahead.stream, self._run.plan
        if stream is not None and (stream.resident is not None or self._run.subject.plan.workers is not None):
            self._feeding.end()
        if stream is None or not self._feeding.is_open or ahead.loader is None:
            return
        advice = self._feeding.advice(stream, ahead.left)
        if advice is None:
            return
        if advice.number > stream.workers and stream.why_workers_stay is None:
            number = stream.change_workers(advice.number, advice.prefetch_factor)
            loop.carry_out(replace(plan, workers=number), advice.why)
            self.record.say(advice.why)
        for lever in LEVERS:
            if lever.adds_workers:
                self.record.judge(lever, "kept" if self._run.plan.workers else "not tried", advice.why)
