"""`Finding` and `Diagnosis`: what the doctor found in a script, as plain data. No torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal

from hotloop.records import Record

# confirmed: faster, or no slower with less memory, by more than the noise of the turns, and the losses agree.
# no gain: the script runs with the fix, and the difference is within the noise.
# losses differ, fails: why the fix is not offered, although it may be faster.
# not compared: the losses of two unchanged runs differ, so nothing can be said of the fix.
# not verified: only a person can make the change, or its line did not run.
Verdict = Literal["confirmed", "no gain", "losses differ", "fails", "not compared", "not verified"]
Tier = Literal["A", "B"]
LEAST = 1.02  # times as fast that is worth a change
LEAST_MEMORY = 0.95  # of the memory
CHANCE = 0.05  # that as large a difference comes from noise alone


@dataclass(frozen=True)
class Turn(Record):
    """One run of the script, timed for some steps."""

    step: float  # seconds, the mean; with everything that happens between steps. Or of a batch of an evaluation
    losses: tuple[float, ...]  # of every backward pass, warm-up included; of an evaluation, means of outputs
    memory: int | None  # bytes: the peak on a GPU; on a CPU those of the process after the last step


@dataclass(frozen=True)
class Gain(Record):
    """Runs without and with a fix, in turns."""

    before: tuple[Turn, ...]
    after: tuple[Turn, ...]

    @property
    def times(self) -> float:
        """How many times as fast a step is, by medians."""
        return median(turn.step for turn in self.before) / median(turn.step for turn in self.after)

    @property
    def least(self) -> float:
        """The same of the fastest turn without the fix and the slowest with it."""
        return min(turn.step for turn in self.before) / max(turn.step for turn in self.after)

    @property
    def most(self) -> float:
        return max(turn.step for turn in self.before) / min(turn.step for turn in self.after)

    @property
    def memory(self) -> float | None:
        """The memory with the fix as a share of that without it."""
        before, after = ([turn.memory for turn in turns if turn.memory] for turns in (self.before, self.after))
        return median(after) / median(before) if before and after else None

    @property
    def is_faster(self) -> bool:
        return self.times >= LEAST and self._is_less(lambda turn: turn.step, self.before, self.after)

    @property
    def is_slower(self) -> bool:
        return self.times <= 1 / LEAST and self._is_less(lambda turn: turn.step, self.after, self.before)

    @property
    def is_smaller(self) -> bool:
        less = self.memory is not None and self.memory <= LEAST_MEMORY
        return less and self._is_less(lambda turn: float(turn.memory or 0), self.before, self.after)

    @property
    def helps(self) -> bool:
        return self.is_faster or (self.is_smaller and not self.is_slower)

    @property
    def is_undecided(self) -> bool:
        """Whether it seems to be faster, and the turns vary too much to say so."""
        return self.times >= LEAST and not self.is_faster

    def _is_less(self, of: Callable[[Turn], float], before: Sequence[Turn], after: Sequence[Turn]) -> bool:
        return chance([of(turn) for turn in before], [of(turn) for turn in after]) <= CHANCE

    def __str__(self) -> str:
        words = [f"{self.times:.2f}× as fast ({self.least:.2f} to {self.most:.2f})"] if self.is_faster else []
        if self.is_smaller and self.memory is not None:
            words.append(f"{1 - self.memory:.0%} less memory")
            if self.is_slower:
                words.append(f"{1 / self.times:.2f}× as slow")
        return ", ".join(words) or f"{self.times:.2f}× as fast, within the noise ({self.least:.2f} to {self.most:.2f})"


def chance(before: Sequence[float], after: Sequence[float]) -> float:
    """How probable it is that all of `after` came out as low, beside `before`, if both were drawn from the same.

    Exact, by ranks (Mann and Whitney's test, one-sided): of three and three, all three must be lower.

    >>> chance([3.0, 4.0, 5.0], [1.0, 2.0, 2.5]), chance([3.0, 4.0, 5.0], [1.0, 2.0, 3.5])
    (0.05, 0.1)
    """
    values = (*before, *after)
    ordered = sorted(values)
    ranks = [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
    seen = sum(ranks[len(before) :])
    sums = [sum(each) for each in combinations(ranks, len(after))]
    return sum(each <= seen for each in sums) / len(sums)


@dataclass(frozen=True)
class Finding(Record):
    """Something that slows a script down: where, the evidence, what to do, and what that gave."""

    rule: str
    tier: Tier  # of the fix: A keeps the numbers, B changes the rounding
    file: str
    line: int
    code: str
    what: str  # what is wrong, with the evidence
    fix: str  # what to do
    diff: str = ""  # empty where only a person can make the change
    verdict: Verdict = "not verified"
    why: str = ""  # the reason of a verdict that no gain explains
    gain: Gain | None = None
    losses: str = ""  # how they compare
    of_evaluation: bool = False  # the gain is that of an evaluated batch, not of a training step
    on_top: bool = False  # tried on top of the fixes that were confirmed before it

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Diagnosis(Record):
    """What the doctor found in a script: confirmed findings first, by their gain."""

    script: str
    device: str
    device_name: str
    date: str  # ISO 8601, UTC
    versions: dict[str, str]
    warmup: int  # steps of each turn before those that were timed
    steps: int  # that were timed in each turn
    step: float  # seconds of one in the unchanged script
    waited: float  # share of a step in which the script waits for its DataLoader
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]  # the rules that were asked
    together: Gain | None = None  # all confirmed fixes at once
    losses: str = ""  # of that
    fixes: int = 0  # that are in the patch: confirmed ones that go together
    diff: str = ""  # the patch
    notes: tuple[str, ...] = ()

    @property
    def confirmed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "confirmed")
