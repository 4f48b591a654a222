"""`Tuner`: decides while a run goes on whether to tune it, and when."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from hotloop.effects import look
from hotloop.levers import COMPILE, LEVERS, Lever, levers_of
from hotloop.plan import Plan, Trial, Tuning
from hotloop.step.training import TrainingStep
from hotloop.text import duration, shorten
from hotloop.tune.search import WORTH
from hotloop.tune.trial import Material
from hotloop.tune.tuning import (
    MOST,
    Cache,
    Found,
    Pace,
    Subject,
    budget_for,
    for_a_run_of,
    gated,
    material_of,
    nothing_tried,
    tune,
)

T = TypeVar("T")
WORTH_A_LOOK = 1.0  # seconds that a run must still take before a plan is thought of
WATCHED = 2  # real steps whose effects are looked at before anything is tried
HELD_UP = 0.03  # of the rest of a run, for which a compilation may hold it up unasked
QUICK = [lever for lever in LEVERS if "compilation" not in lever.cost]
WITH_COMPILE = [lever for lever in LEVERS if lever.name in ("compile", "channels last", "bf16")]


class Told(Protocol):
    """Who is told what the tuner does: the progress of a run."""

    def say(self, words: str) -> None:
        """A line that stays."""

    def tell(self, words: str) -> None:
        """What is going on right now."""


class Tuner:
    """Tunes a run by itself, once its first steps have shown that it is long enough.

    First two real steps are watched: where the person's code changes something that a trial could not restore, such as
    a counter in a closure or a queue in a module, nothing is tried. Then the levers that are quick to try are tried,
    and a compilation where it takes a small part of the run. `adopt` is told each plan to carry out, with the step that
    was tried for it.
    """

    def __init__(
        self,
        subject: Subject,
        adopt: Callable[[Tuning, TrainingStep | None], None],
        plain: Callable[[], AbstractContextManager[None]],  # in which the loop is as before any plan
        *,
        asked: bool,
    ) -> None:
        self.tuning: Tuning | None = None  # how the present plan was found
        self.seconds = 0.0  # spent on trials
        self.display: Told | None = None  # of a fit that is running
        self.subject = subject
        self.watches = 0  # steps still to be watched
        self._adopt = adopt
        self._plain = plain
        self._open = asked  # nothing was tried yet, and something may be
        self._considered = False  # since the epoch or the fit began
        self.considered_for: int | None = None  # batches that were left when it was decided whether to try anything
        self._pace = Pace(subject.device)
        self._effects: dict[str, None] = {}  # names of what the watched steps changed for good
        self._effects_known = False  # all steps were watched, and nothing was decided since

    @property
    def is_busy(self) -> bool:
        """Whether it wants to be asked before steps."""
        return self._open

    def go_on(self, tuning: Tuning | None, considered_for: int | None) -> None:
        """An earlier part of this run found its plan like this, or nothing that pays in a rest of so many batches."""
        self.considered_for = considered_for
        if tuning is not None:
            self.tuning, self._open = tuning, False

    @property
    def decided_for(self) -> int | None:
        """For how many batches it was decided whether to try anything; None where that is yet to come."""
        return None if self.watches or self._effects_known else self.considered_for

    def begin(self) -> None:
        """A new epoch or fit: what was too short to be tuned may be longer now."""
        self._considered = False

    def tune(self, loader: Any, transform: Any, *, steps: int | None, seconds: float | None, tell: Any) -> Tuning:
        """Tune now, compilations included."""
        material = material_of(loader, self.subject.device, transform)
        with self._plain():
            found = tune(self.subject, loader, material, steps=steps, seconds=seconds, budget=MOST, tell=tell)
        self._keep(found.tuning, found.step)
        Cache().put(self.subject.key(material.batches[0], loader, transform), found.tuning)
        return found.tuning

    def look(self, loader: Any, transform: Any, batch: Any, left: int | None) -> None:
        """Before a step that begins a window of accumulation, with so many batches left to run."""
        pace = self._pace.seconds
        if pace is None or self.watches:
            return
        if not self._considered:
            self._considered = True
            if self.considered_for is not None and left is not None and left <= self.considered_for:
                return  # as in an earlier part of this run
            self.considered_for = left
            if left is not None and left * pace >= WORTH_A_LOOK:
                self.watches = WATCHED
            return
        if not self._effects_known or left is None:
            return
        self._effects_known = False
        self._decide(loader, transform, batch, left, pace)

    def watch(self, what: dict[str, object], call: Callable[[], T]) -> T:
        """Carry out a call of the person's code, and note what it changes that a trial could not restore."""
        roots, skip = self.subject.roots(what), self.subject.restorable()
        before = look(roots, skip)
        result = call()
        self._effects |= dict.fromkeys(before.changes(look(roots, skip)))
        return result

    def watched(self) -> None:
        """A step was watched."""
        self.watches -= 1
        self._effects_known = not self.watches

    def _decide(self, loader: Any, transform: Any, batch: Any, left: int, pace: float) -> None:
        if self._effects:
            why = f"a step changes {shorten(list(self._effects), 4)}, which trials could not restore"
            self.tuning, self._open = nothing_tried(self.subject, why, left), False
            if self.display is not None:
                self.display.say(f"not tuned: {why}")
            return
        key = self.subject.key(batch, loader, transform)
        known = Cache().get(key, self.subject.plan)
        if known is not None and (known.steps is None or left < 3 * known.steps):
            material = material_of(loader, self.subject.device, transform, batch)
            tuning = for_a_run_of(known, left * pace)
            with self._plain():
                seconds, why_not, step = gated(self.subject, loader, material, tuning.plan)
            self.seconds += seconds
            if why_not is None:
                self._keep(tuning, step)
                self._say("the plan of an earlier run: ")
                return
            if self.display is not None:
                self.display.say(f"the plan of an earlier run does not hold: {why_not}")
        if budget := budget_for(left * pace, pace):
            material = material_of(loader, self.subject.device, transform, batch)
            found = self._try(loader, material, left, budget=budget, levers=QUICK)
            self._say(f"tuned in {duration(found.tuning.seconds)}: ")
            self._compile(found, loader, material, left, key)

    def tick(self) -> None:
        """Before each step, as long as the pace is not known."""
        if self._open:
            self._pace.tick()

    def _keep(self, tuning: Tuning, tried: TrainingStep | None) -> None:
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
                tell=self._tell,
                begin=begin,
                watched=True,
            )
        self.seconds += found.tuning.seconds
        self._keep(found.tuning, found.step)
        return found

    def _compile(self, found: Found, loader: Any, material: Material, left: int, key: str) -> None:
        """Compile where that takes a small part of the run and may pay.

        Training waits for it. A compiler in a thread beside it would not do: Dynamo saves PyTorch's global state, rng
        states included, when it begins and restores it when it ends, so that training would draw numbers twice.
        """
        before = found.tuning
        run, cost = left * (before.step or 0.0), found.compile_estimate
        obstacle = COMPILE.why_not(self.subject.scene(loader), before.plan)
        if obstacle is None and (cost > HELD_UP * run or run * (1 - 1 / WORTH) < cost):
            known = f"a compilation of about {duration(cost)}"
            obstacle = f"{known} is too long for a run of {duration(run)}; `loop.tune` tries it"
        if obstacle is not None:
            self.tuning = replace(before, trials=(*before.trials, Trial("compile", "B", "not tried", obstacle)))
            Cache().put(key, self.tuning)
            return
        Cache().put(key, before)  # the run may end before the compiler does
        found = self._try(loader, material, left, budget=MOST, levers=WITH_COMPILE, begin=before.plan)
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

    def _tell(self, lever: str) -> None:
        """Name the lever that is being tried, beside the bar."""
        if self.display is not None:
            self.display.tell(f"tuning: {lever}")

    def _say(self, words: str) -> None:
        """Tell of the plan, where there is someone to tell."""
        if self.display is not None and self.tuning is not None:
            kept, gain = ", ".join(levers_of(self.tuning.plan)), self.tuning.gain
            faster = f"{gain:.3g}× the plain loop: " if gain else ""
            self.display.say(f"{words}{faster}{kept}" if kept else f"{words}the plain loop stays: nothing pays here")
