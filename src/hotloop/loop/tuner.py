"""`Tuner`: decides while a run goes on whether to tune it, when, and what to compile beside it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from hotloop.levers import COMPILE, LEVERS, Lever, levers_of
from hotloop.loop.preparation import Preparation
from hotloop.loop.progress import Display
from hotloop.loop.step import Step
from hotloop.loop.trial import Material, guess_of_compilation
from hotloop.loop.tuning import MOST, Cache, Found, Pace, Subject, budget_for, for_a_run_of, material_of, tune
from hotloop.plan import Plan, Trial, Tuning
from hotloop.text import duration
from hotloop.tune import WORTH

WORTH_A_LOOK = 1.0  # seconds that a run must still take before a plan is thought of
UNKNOWN = 10**9  # batches of a run whose length nobody knows, once it has proved to be long
QUICK = [lever for lever in LEVERS if "compilation" not in lever.cost]
WITH_COMPILE = [lever for lever in LEVERS if lever.name in ("compile", "channels last", "bf16")]


class Tuner:
    """Tunes a run by itself, once its first steps have shown that it is long enough.

    Levers that are quick to try are tried at once. A compilation that will pay is prepared beside the training and
    compared when it is done. `adopt` is told each plan to carry out, with the step that was tried for it.
    """

    def __init__(
        self,
        subject: Subject,
        adopt: Callable[[Tuning, Step | None], None],
        plain: Callable[[], AbstractContextManager[None]],  # in which the loop is as before any plan
        *,
        asked: bool,
    ) -> None:
        self.tuning: Tuning | None = None  # how the present plan was found
        self.seconds = 0.0  # spent on trials
        self.display: Display | None = None  # of a fit that is running
        self.subject = subject
        self._adopt = adopt
        self._plain = plain
        self._open = asked  # nothing was tried yet, and something may be
        self._considered = False  # since the epoch or the fit began
        self._pace = Pace(subject.device)
        self._preparation: Preparation | None = None
        self._weigh: Callable[[int], None] = lambda left: None

    @property
    def is_busy(self) -> bool:
        """Whether it wants to be asked before steps."""
        return self._open or self._preparation is not None

    def go_on(self, tuning: Tuning) -> None:
        """The plan of an earlier part of this run was found like this."""
        self.tuning, self._open = tuning, False

    def begin(self) -> None:
        """A new epoch or fit: what was too short to be tuned may be longer now."""
        self._considered = False

    def tune(self, loader: Any, transform: Any, *, steps: int | None, seconds: float | None, tell: Any) -> Tuning:
        """Tune now, compilations included."""
        material = material_of(loader, self.subject.device, transform)
        with self._plain():
            found = tune(self.subject, loader, material, steps=steps, seconds=seconds, budget=MOST, tell=tell)
        self._keep(found.tuning, found.step)
        Cache().put(self.subject.key(material.batches[0], loader), found.tuning)
        return found.tuning

    def look(self, loader: Any, transform: Any, batch: Any, left: int | None) -> None:
        """Before a step that begins a window of accumulation, with so many batches left to run."""
        if self._preparation is not None:
            if self._preparation.done:
                self._compare(left)
            return
        pace = self._pace.seconds
        if self._considered or pace is None:
            return
        self._considered = True
        if left is None or left * pace < WORTH_A_LOOK:
            return
        key = self.subject.key(batch, loader)
        known = Cache().get(key)
        if known is not None and (known.steps is None or left < 3 * known.steps):
            self._keep(for_a_run_of(known, left * pace), None)
            self._say("the plan of an earlier run: ")
            if not any(trial.lever == "compile" for trial in known.trials):  # that run ended before its compiler did
                material = material_of(loader, self.subject.device, transform, batch)
                guess = guess_of_compilation(self.subject.model)
                self._prepare(Found(known, None, compile_estimate=guess), loader, material, left, key)
        elif budget := budget_for(left * pace, pace):
            material = material_of(loader, self.subject.device, transform, batch)
            found = self._try(loader, material, left, budget=budget, levers=QUICK)
            self._say(f"tuned in {duration(found.tuning.seconds)}: ")
            self._prepare(found, loader, material, left, key)

    def tick(self) -> None:
        """Before each step, as long as the pace is not known."""
        if self._open:
            self._pace.tick()

    def _keep(self, tuning: Tuning, tried: Step | None) -> None:
        self._open = False
        self.tuning = tuning
        self._adopt(tuning, tried)

    def _try(
        self,
        loader: Iterable[Any],
        material: Material,
        left: int,
        *,
        budget: float,
        levers: list[Lever],
        begin: Plan | None = None,
        prepared: Preparation | None = None,
    ) -> Found:
        """Tune, and carry out what was found."""
        with self._plain():
            found = tune(
                self.subject,
                loader,
                material,
                steps=left,
                seconds=None,
                budget=budget,
                levers=levers,
                tell=self.display.tell if self.display else lambda words: None,
                begin=begin,
                prepared=None if prepared is None else {"default": prepared.compiled},
            )
        self.seconds += found.tuning.seconds
        self._keep(found.tuning, found.step)
        return found

    def _prepare(self, found: Found, loader: Any, material: Material, left: int, key: str) -> None:
        """Compile where that may pay: beside the training or, where that would disturb it, before it goes on."""
        tuning = found.tuning
        run = left * (tuning.step or 0.0)
        obstacle = COMPILE.why_not(self.subject.scene(loader), tuning.plan)
        if obstacle is None and run * (1 - 1 / WORTH) < found.compile_estimate:
            cost = duration(found.compile_estimate)
            obstacle = f"a compilation of about {cost} would not pay back in a run of {duration(run)}"
        if obstacle is not None:
            self.tuning = replace(tuning, trials=(*tuning.trials, Trial("compile", "B", "not tried", obstacle)))
            Cache().put(key, self.tuning)
            return
        preparation: Preparation | None = None
        if not found.is_random:
            batch = material.batches[0]
            preparation = Preparation.begun(self.subject.model, self.subject.turns, COMPILE.pull(tuning.plan), batch)

        def weigh(left: int) -> None:
            self._weigh_compiled(loader, material, left, key, preparation)

        if preparation is None:
            weigh(left)
        else:
            self._preparation, self._weigh = preparation, weigh
            Cache().put(key, tuning)  # the run may end before the compiler does

    def _compare(self, left: int | None) -> None:
        """The compiler is done: see whether its work is worth having."""
        preparation, self._preparation = self._preparation, None
        assert preparation is not None
        if preparation.failure is None:
            self._weigh(UNKNOWN if left is None else left)
        elif self.tuning is not None:
            failed = Trial("compile", "B", "dropped", f"the compiler failed: {preparation.failure}")
            self.tuning = replace(self.tuning, trials=(*self.tuning.trials, failed))

    def _weigh_compiled(
        self, loader: Any, material: Material, left: int, key: str, prepared: Preparation | None
    ) -> None:
        """Compare the plan so far with its compiled form, and carry out the better one."""
        before = self.tuning
        assert before is not None
        found = self._try(
            loader, material, left, budget=MOST, levers=WITH_COMPILE, begin=before.plan, prepared=prepared
        )
        tried = {t.lever: t for t in found.tuning.trials if t.verdict == "kept" or t.lever == "compile"}
        self.tuning = replace(
            before,
            plan=found.tuning.plan,
            trials=(*(t for t in before.trials if t.lever not in tried), *tried.values()),
            step=found.tuning.step,
            seconds=before.seconds + found.tuning.seconds,
        )
        Cache().put(key, self.tuning)
        self._say("compiled: " if found.tuning.plan.compile != "off" else "a compilation brings nothing here: ")

    def _say(self, words: str) -> None:
        """Tell of the plan, where there is someone to tell."""
        if self.display is not None and self.tuning is not None:
            gain = f"{self.tuning.gain:.3g}× the plain loop" if self.tuning.gain else "the plain loop"
            self.display.say(f"{words}{gain}: {', '.join(levers_of(self.tuning.plan)) or 'nothing pays here'}")
