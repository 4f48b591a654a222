"""`Search`: which levers are tried, in which order, and which are kept; it sees timings, not the model."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from hotloop.levers import LEVERS, Lever, LeverTarget
from hotloop.plan import Plan, Trial
from hotloop.printing.text import duration

LEAST_GAIN = 1.01  # a lever that gives less is not worth having
WORTH = 1.5  # what a compilation is hoped to give, before it was tried


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

    def is_above_noise(self) -> bool:
        """Whether the gain is at least `LEAST_GAIN`, and four rounds of five were faster."""
        faster = sum(ratio > 1 for ratio in self.ratios)
        return self.gain >= LEAST_GAIN and faster >= 0.8 * len(self.ratios)


class Contest(Protocol):
    """Runs plans on the person's own loop for the search."""

    def compare(self, plan: Plan, other: Plan) -> PlanComparison:
        """Time two plans in turns; raises `Refused` where the other cannot run."""

    def gate(self, plan: Plan) -> tuple[float | None, str | None]:
        """The relative departure of the loss from the plain plan's, and why it is too far or None."""

    def compile_estimate(self, plan: Plan) -> float:
        """Seconds that the compilation of a plan will take."""


@dataclass
class Search:
    """The search from the plain plan to the best one."""

    contest: Contest
    scene: LeverTarget
    best: Plan
    steps: int | None  # still to run
    budget: float  # seconds for everything but compilations
    tell: Callable[[str], None] = lambda words: None
    trials: list[Trial] = field(default_factory=list)
    step: float = 0.0  # seconds of a step of the best plan
    spent: float = 0.0

    def run(self, levers: Iterable[Lever] = LEVERS) -> Plan:
        """Try each lever; then retry those that were too slow where a lever kept since may have changed that."""
        again: list[tuple[Lever, Plan]] = []
        late: list[Lever] = []
        for lever in levers:
            if self.step > lever.late_above:
                late.append(lever)  # its gain would not show yet
            elif self._try(lever) == "slow":
                again.append((lever, self.best))
        for lever in late:
            self._try(lever)
        for lever, plan in again:
            if plan != self.best:
                self._try(lever, again=True)
        return self.best

    def _try(self, lever: Lever, *, again: bool = False) -> str:
        if why := lever.why_not(self.scene, self.best) or self._unaffordable(lever):
            if not again:
                self.trials.append(Trial(lever.name, lever.tier, "not tried", why))
            return "not tried"
        self.tell(lever.name)
        start, plan = time.perf_counter(), lever.pull(self.best)
        try:
            result = self.contest.compare(self.best, plan)
        except Refused as refusal:
            self.spent += time.perf_counter() - start
            self._note(Trial(lever.name, lever.tier, "dropped", str(refusal)), again)
            return "refused"
        self.spent += time.perf_counter() - start - (result.cost if "compilation" in lever.cost else 0.0)
        why, verdict = self._judge(lever, result)
        drift: float | None = None
        if verdict == "kept" and lever.tier == "B":
            drift, excess = self.contest.gate(plan)
            why, verdict = (why, verdict) if excess is None else (excess, "wrong")
        after = statistics.median(result.after)
        self._note(
            Trial(
                lever.name,
                lever.tier,
                "kept" if verdict == "kept" else "dropped",
                why,
                gain=result.gain,
                low=result.ratios[0],
                high=result.ratios[-1],
                step=after,
                cost=result.cost,
                drift=drift,
            ),
            again,
        )
        if verdict == "kept":
            self.best, self.step = plan, after
        return verdict

    def _note(self, trial: Trial, again: bool) -> None:
        """Keep a trial; a second one replaces the first only where it changed the verdict."""
        if again and trial.verdict != "kept":
            return
        self.trials = [t for t in self.trials if t.lever != trial.lever or not again]
        self.trials.append(trial)

    def _judge(self, lever: Lever, result: PlanComparison) -> tuple[str, str]:
        """The reason and the verdict on a lever."""
        if result.gain > lever.harmless_above:
            return lever.what, "kept"
        if not result.is_above_noise():
            words = "slower" if result.gain < 1 / LEAST_GAIN else "no gain above the noise"
            return words, "slow"
        saved = (statistics.median(result.before) - statistics.median(result.after)) * (self.steps or 0)
        if self.steps is not None and saved < result.cost:
            return f"it would save {duration(saved)} in this run and costs {duration(result.cost)}", "costly"
        return lever.what, "kept"

    def _unaffordable(self, lever: Lever) -> str | None:
        """Why there is no time to try a lever; None where there is."""
        if "compilation" not in lever.cost:
            return "the time for tuning was used up" if self.spent >= self.budget else None
        if self.steps is None:
            return "the length of the run is not known, so that a compilation may not pay back"
        cost = self.contest.compile_estimate(lever.pull(self.best))
        run = self.steps * self.step
        hoped = WORTH if lever.cost == "a compilation" else 1.05
        if run * (1 - 1 / hoped) < cost:
            return f"a compilation of about {duration(cost)} would not pay back in a run of {duration(run)}"
        return None
