"""The tuner: tries levers one after another on a loop that it is handed, and keeps what measurably pays."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from hotloop.levers import LEVERS, Lever, LeverTarget
from hotloop.plan import Plan, Trial
from hotloop.text import duration

LEAST_GAIN = 1.01  # a lever that gives less is not worth having
WORTH = 1.5  # what a compilation is hoped to give, before it was tried
LOSS_TOLERANCE = 0.02  # departure of the mean loss over the trial from the plain run's, as a share of it
STEP_BY_STEP = 5  # times as much is allowed from step to step, where it may go either way
# How far the cosine to the plain gradient may fall below 1. Batch normalisation makes the gradients of deep networks
# touchy: those of a sound ResNet-18 in bf16 have 0.95, while two batches of its data agree far less than that.
DIRECTION_TOLERANCE = 0.1


class Refused(Exception):
    """Why a plan could not be tried."""


@dataclass(frozen=True)
class Drift:
    """How far a run went from the run in fp32, and how far two such runs go from each other by chance."""

    loss: float  # between the mean losses, as a share of them
    direction: float  # 1 - cosine between the first gradients
    loss_noise: float = 0.0
    direction_noise: float = 0.0
    apart: float = 0.0  # mean distance of the losses step by step, which grows with every step from mere rounding

    def excess(self) -> str | None:
        """What was outside the tolerance, in words; None where nothing was."""
        loss, direction = max(LOSS_TOLERANCE, 2 * self.loss_noise), DIRECTION_TOLERANCE + 2 * self.direction_noise
        if not self.loss <= loss:
            return f"the loss went {self.loss:.1%} from the plain run; {loss:.1%} is allowed"
        if not self.apart <= STEP_BY_STEP * loss:
            return f"the losses are {self.apart:.1%} from the plain run; {STEP_BY_STEP * loss:.1%} is allowed"
        if not self.direction <= direction:
            cosine, least = 1 - self.direction, 1 - direction
            return (
                f"the gradient turned from that of the plain run: cosine {cosine:.3f}, at least {least:.3f} is allowed"
            )
        return None


@dataclass(frozen=True)
class PlanComparison:
    """Two plans, timed in turns on the same batches; seconds per step of each round."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    cost: float  # seconds until the second ran: a capture, a compilation
    drift: Drift | None = None

    @property
    def ratios(self) -> list[float]:
        return sorted(a / b for a, b in zip(self.before, self.after, strict=True))

    @property
    def gain(self) -> float:
        return statistics.median(self.ratios)

    def is_above_noise(self) -> bool:
        """Whether it was faster in all rounds but at most one in five, and by more than nothing."""
        faster = sum(ratio > 1 for ratio in self.ratios)
        return self.gain >= LEAST_GAIN and faster >= 0.8 * len(self.ratios)


class Contest(Protocol):
    """What the tuner is handed: it times plans on the person's own loop."""

    def compare(self, plan: Plan, other: Plan) -> PlanComparison:
        """Time two plans in turns. Raises `Refused` where the other cannot run."""

    def compile_estimate(self, lever: Lever) -> float:
        """Seconds that a compilation will take, by guess or from an earlier one."""


@dataclass
class Search:
    """From the plain plan to the best one that was found."""

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
        """Try each lever; then once more those that were too slow, where what was kept since may have changed that."""
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
        start = time.perf_counter()
        try:
            result = self.contest.compare(self.best, lever.pull(self.best))
        except Refused as refusal:
            self.spent += time.perf_counter() - start
            self._note(Trial(lever.name, lever.tier, "dropped", str(refusal)), again)
            return "refused"
        taken = time.perf_counter() - start
        self.spent += taken - (result.cost if "compilation" in lever.cost else 0.0)
        why, verdict = self._judge(lever, result)
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
                drift=result.drift.loss if result.drift else None,
            ),
            again,
        )
        if verdict == "kept":
            self.best, self.step = lever.pull(self.best), after
        return verdict

    def _note(self, trial: Trial, again: bool) -> None:
        """Keep a trial; a second one replaces the first only where it changed the verdict."""
        if again and trial.verdict != "kept":
            return
        self.trials = [t for t in self.trials if t.lever != trial.lever or not again]
        self.trials.append(trial)

    def _judge(self, lever: Lever, result: PlanComparison) -> tuple[str, str]:
        """Why a lever is kept or dropped, and a word for it."""
        excess = result.drift.excess() if result.drift and lever.tier == "B" else None
        if excess:
            return excess, "wrong"
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
        """Why there is no time to try it."""
        if "compilation" not in lever.cost:
            return "the time for tuning was used up" if self.spent >= self.budget else None
        if self.steps is None:
            return "the length of the run is not known, so that a compilation may not pay back"
        cost = self.contest.compile_estimate(lever)
        run = self.steps * self.step
        hoped = WORTH if lever.cost == "a compilation" else 1.05
        if run * (1 - 1 / hoped) < cost:
            return f"a compilation of about {duration(cost)} would not pay back in a run of {duration(run)}"
        return None
