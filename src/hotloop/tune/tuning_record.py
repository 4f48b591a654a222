"""`TuningRecord`: what a run finds of its plan and of each lever: recorded, said, remembered for later runs."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from hotloop.errors import OutputError, PlanWarning
from hotloop.levers import LEVERS, Lever, in_words
from hotloop.levers.base import UNCAPTURED
from hotloop.plan import Plan, Trial, Tuning, Verdict
from hotloop.records.cache import cache_folder, make_private, why_foreign
from hotloop.records.files import write_json
from hotloop.step.norms import HasStep
from hotloop.tune.subject import Subject
from hotloop.version import versions


class TuningRecord:
    """What became of the levers in a run, and how its plan was found."""

    def __init__(self, subject: Subject, loop: HasStep) -> None:
        self.tuning: Tuning | None = None  # how the present plan was found
        self.considered_for: int | None = None  # batches that were left when it was decided whether to plan anything
        self.seconds = 0.0  # that were not spent in training steps
        self.key: str | None = None  # under which the levers that were dropped are remembered; None: they are not
        self.say: Callable[[str], None] = lambda words: None  # of a fit that is running
        self._subject, self._loop = subject, loop
        self._found: dict[str, tuple[Verdict, str]] = {}  # of levers, beyond what the rules say, and why
        self._slow: set[str] = set()  # levers that were dropped for their time alone

    @property
    def dropped(self) -> dict[str, str]:
        """The levers that did not work here, and why."""
        return {lever: why for lever, (verdict, why) in self._found.items() if verdict == "dropped"}

    def has_dropped(self, wanted: Callable[[Lever], bool]) -> bool:
        """Whether a lever of that kind did not work here."""
        return any(wanted(lever) and lever.name in self.dropped for lever in LEVERS)

    def spend(self, seconds: float) -> None:
        """Add time that was not spent in training steps."""
        self.seconds += seconds

    def judge(self, lever: Lever, verdict: Verdict, why: str) -> None:
        """Record what has become of a lever."""
        self._found[lever.name] = verdict, why
        self._apply(lever.name)

    def drop_slow(self, lever: Lever, ratio: float) -> None:
        """Drop a lever with which a step took so many times as long; other programs may be why, so a later run tries it
        again."""
        self._slow.add(lever.name)
        how = "as long as without it" if round(ratio, 2) == 1 else f"{ratio:.3g} times as long"
        self.judge(lever, "dropped", f"with it a step took {how}")

    def _apply(self, name: str) -> None:
        if self.tuning is not None:
            verdict, why = self._found[name]
            trials = [replace(t, verdict=verdict, why=why) if t.lever == name else t for t in self.tuning.trials]
            self.tuning = replace(self.tuning, trials=tuple(trials), plan=self._loop.step.plan)

    def capture_failed(self, why: str) -> None:
        """Drop the levers for captures: the step cannot be captured as a CUDA graph."""
        for lever in LEVERS:
            if lever.captures or lever.for_captures:
                self.judge(lever, "dropped", why if lever.captures else UNCAPTURED)

    def adopted(self, trials: Sequence[Trial], left: int | None) -> None:
        """Record the plan of the rules, with what was found before, such as more workers."""
        self.tuning = record(self._subject, self._loop.step.plan, trials, None, None, left, self.seconds)
        for name in self._found:
            self._apply(name)

    def timed(self, step: float) -> None:
        """Record the plan in use. Single steps have decided, and give no figure of what it gains."""
        assert self.tuning is not None
        self.tuning = replace(self.tuning, plan=self._loop.step.plan, step=step, seconds=self.seconds)
        self.remember()
        if kept := ", ".join(in_words(self._loop.step.plan)):
            self.say(f'the plan: {kept}; plan="plain" for fp32 eager')

    def untimed(self) -> None:
        """Record the plan in use, of which nobody has measured how fast it is."""
        if self.tuning is not None:
            self.tuning = replace(self.tuning, plan=self._loop.step.plan, step=None)
            self.remember()

    def failed(self, words: str) -> None:
        """Drop all levers after an error of the tuner itself, and remember nothing."""
        self.key = None
        for lever in LEVERS:
            if lever.name not in self.dropped:
                self._found[lever.name] = "dropped", words
        trials = [Trial(lever.name, lever.tier, *self._found[lever.name]) for lever in LEVERS]
        self.tuning = record(self._subject, self._subject.plan, trials, None, None, self.considered_for, self.seconds)

    def resume(self, tuning: Tuning | None, considered_for: int | None) -> None:
        """Load what an earlier part of the run has recorded."""
        self.considered_for = considered_for
        if tuning is not None:
            self.tuning = tuning

    def tuned(self, tuning: Tuning) -> None:
        """Record what trials have found."""
        self.tuning, self.key = tuning, None

    def recall(self, key: str) -> None:
        """Take over what did not work in earlier runs of the model."""
        self.key = key
        self._found |= {lever: ("dropped", why) for lever, why in DroppedLevers().get(key).items()}

    def remember(self) -> None:
        """Keep what failed or gave wrong numbers for later runs of the model."""
        if self.key is not None:
            known = DroppedLevers()
            failed = {lever: why for lever, why in self.dropped.items() if lever not in self._slow}
            known.put(self.key, known.get(self.key) | failed)

    @contextmanager
    def saying(self, say: Callable[[str], None]) -> Iterator[None]:
        """Say what happens by this function inside the block."""
        before, self.say = self.say, say
        try:
            yield
        finally:
            self.say = before


def record(
    subject: Subject,
    plan: Plan,
    trials: Sequence[Trial],
    plain_step: float | None,
    step: float | None,
    steps: int | None,
    seconds: float,
) -> Tuning:
    """How a plan was found, with the time and place."""
    return Tuning(
        plan=plan,
        trials=tuple(trials),
        plain_step=plain_step,
        step=step,
        steps=steps,
        seconds=seconds,
        device_name=subject.device_name,
        model=type(subject.model).__name__,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
    )


class DroppedLevers:
    """Levers with the reason why they were dropped; files that cannot be read or written are ignored."""

    LARGEST = 1 << 20  # bytes of a file; what is larger is not of ours

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        with suppress(RuntimeError, ValueError, OSError):  # nobody knows where home is
            self._folder = folder or cache_folder("plans")

    def get(self, key: str) -> dict[str, str]:
        """The levers under a key, each with the reason."""
        if self._folder is not None:
            path = self._folder / f"{key}.json"
            with suppress(OSError, ValueError, RecursionError, MemoryError):
                if path.is_file() and path.stat().st_size <= self.LARGEST and self._is_ours(path):
                    found = json.loads(path.read_text(encoding="utf-8"))
                    if isinstance(found, dict) and all(isinstance(why, str) for why in found.values()):
                        return found
        return {}

    def put(self, key: str, levers: dict[str, str]) -> None:
        if self._folder is not None:
            path = self._folder / f"{key}.json"
            with suppress(OutputError, OSError, ValueError):
                make_private(self._folder)
                if self._is_ours(path):
                    write_json(path, levers, mode=0o600)

    def _is_ours(self, path: Path) -> bool:
        why = why_foreign(path)
        if why is not None:
            warnings.warn(
                f"{why}, so plans are neither read nor kept there: set HOTLOOP_CACHE to a folder of your own, or "
                f"`chmod -R go-w {path.parent.parent}` where nobody else uses it",
                PlanWarning,
                stacklevel=2,
            )
        return why is None
