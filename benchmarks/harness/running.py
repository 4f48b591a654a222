"""The race: every contestant on every workload and device, in turns, and what was measured of each."""

import gc
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from harness.about import begun
from harness.contestants import DoesNotApply, Start, Started
from harness.counting import Count, count_of
from harness.curves import curves
from harness.records import Benchmark, Curves, Score
from harness.switches import OwnSwitches
from harness.workloads import Workload, workload
from hotloop._torch import compiler_is_loaded
from hotloop.device.clock import synchronize
from hotloop.errors import BadArgument, HotloopError
from hotloop.plan import Plan
from hotloop.printing.text import count, duration
from hotloop.profiling.ceilings import ceilings

LEAST_SECONDS = 0.5  # of a repeat: what is shorter is run again and again until it is long enough to time
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """What to run."""

    workloads: tuple[str, ...]
    devices: tuple[torch.device, ...]
    contestants: Mapping[str, Start]
    repeats: int = 3
    quick: bool = False
    curves: bool = True
    seed: int = 0
    curve_steps: int = 120

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise BadArgument(f"repeats={self.repeats}", fix="give a whole number of at least 1; 3 show the spread")


def run(
    setup: Setup,
    *,
    command: str = "",
    tell: Tell = lambda _: None,
    keep: Callable[[Benchmark], object] = lambda _: None,
) -> Benchmark:
    """The whole benchmark; what cannot run is recorded as a failure, and the rest goes on.

    `keep` is handed what there is after each workload, so that a run that is cut short leaves what it measured.
    """
    about = begun(setup.devices, command, quick=setup.quick)
    scores: list[Score] = []
    drawn: list[Curves] = []
    failures: list[str] = []
    limits: dict[str, dict[str, float]] = {}

    def so_far() -> Benchmark:
        return replace(about, scores=tuple(scores), curves=tuple(drawn), ceilings=limits, failures=tuple(failures))

    for device in setup.devices:
        tell(f"measuring what {device} can do at most")
        try:
            limits[str(device)] = ceilings(device, quick=setup.quick)
        except RuntimeError as error:  # such as a GPU that others have filled
            failures.append(failure(f"the limits of {device}", error, tell))
        for name in setup.workloads:
            try:
                work = workload(name, device, quick=setup.quick, seed=setup.seed)
                least = 0.0 if setup.quick else LEAST_SECONDS
                done = race(work, setup.contestants, device, repeats=setup.repeats, least=least, tell=tell)
                scores += done.scores
                failures += done.failures
                keep(so_far())
                if setup.curves and done.plan is not None:
                    tell(f"{name} on {device}: loss of {setup.curve_steps} steps beside the tutorial's")
                    fresh_start(device)
                    drawn.append(curves(work, device, setup.curve_steps, plan=done.plan))
            except Exception as error:  # noqa: BLE001  # one workload that cannot run must not end the others
                failures.append(failure(f"{name} on {device}", error, tell))
            keep(so_far())
            fresh_start(device)
    return so_far()


@dataclass
class Race:
    """How a race went."""

    scores: list[Score] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    plan: Plan | None = None  # hotloop's, where it took part


def race(
    work: Workload,
    contestants: Mapping[str, Start],
    device: torch.device,
    *,
    repeats: int = 3,
    least: float = LEAST_SECONDS,
    tell: Tell = lambda _: None,
) -> Race:
    """Scores of the contestants on one workload, and who failed and why.

    The repeats go round, so that whatever the machine does meanwhile hits all alike. One that does not fit into the
    memory beside the others runs alone after them.
    """
    done = Race()
    alone: list[str] = []

    def attempt(racer: _Racer, act: Callable[[], None], *, last: bool) -> bool:
        try:
            act()
        except torch.OutOfMemoryError as error:
            if last or len(contestants) == 1:
                done.failures.append(failure(racer.label, error, tell))
            else:
                alone.append(racer.name)
        except DoesNotApply as error:  # who was asked for by name alone gets the reason
            if len(contestants) == 1:
                done.failures.append(failure(racer.label, error, tell))
        except Exception as error:  # noqa: BLE001  # a contestant may fail in any way, and the others go on
            done.failures.append(failure(racer.label, error, tell))
        else:
            return True
        racer.end()
        return False

    def go(names: list[str], *, last: bool) -> None:
        racers = [_Racer(name, contestants[name], work, device, tell, least) for name in names]
        running = [racer for racer in racers if attempt(racer, racer.begin, last=last)]
        for _ in range(repeats):
            running = [racer for racer in running if attempt(racer, racer.repeat, last=last)]
        for racer in running:
            done.scores.append(racer.score(counts))
            done.plan = racer.plan or done.plan
            racer.end()

    counts = _counts(work, device, tell)
    go(list(contestants), last=False)
    for name in list(alone):
        go([name], last=True)
    return done


@dataclass
class _Racer:
    """One contestant on one workload: begun, repeated, scored."""

    name: str
    start: Start
    work: Workload
    device: torch.device
    tell: Tell
    least: float  # seconds of a repeat
    rates: list[float] = field(default_factory=list)
    begun: float = 0.0  # seconds until it ran
    seconds: float = 0.0  # of everything so far
    epochs: int = 0  # so far
    pace: float = 1.0  # seconds of an epoch, the last time
    steps: int = 0  # of the last repeat
    peak: int | None = None
    _started: Started | None = None

    def __post_init__(self) -> None:
        self._switches = OwnSwitches(self.device)

    @property
    def label(self) -> str:
        return f"{self.work.name} on {self.device}: {self.name}"

    @property
    def plan(self) -> Plan | None:
        return None if self._started is None else self._started.plan

    def begin(self) -> None:
        """Set up, and run one epoch: whatever is compiled or captured is then done."""
        collect(self.device)
        on_gpu = self.device.type == "cuda"
        held = torch.cuda.memory_allocated(self.device) if on_gpu else 0  # by the others
        clock = time.perf_counter()
        with self._switches.turn():
            self._started = self.start(self.work.parts(), self.device)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self.device)
            self._run(1)
            synchronize(self.device)
        self.begun = self.seconds = time.perf_counter() - clock
        if on_gpu:
            own = torch.cuda.max_memory_allocated(self.device) - held
            self.peak = own if own > 0 else None  # it has freed what libraries kept since the others ran
        note = f" ({self._started.note})" if self._started.note else ""
        self.tell(f"{self.label} is ready after {duration(self.begun)}{note}")

    def repeat(self) -> None:
        """One more measurement."""
        clock = time.perf_counter()
        trained, seconds = 0, 0.0
        with self._switches.turn():
            while seconds <= self.least:
                # In as few calls as may be: a run has a beginning and an end, which are not what is timed.
                epochs = max(self.work.epochs, math.ceil((self.least - seconds) / self.pace))
                seconds += self._run(epochs)
                trained += epochs
        self.seconds += time.perf_counter() - clock
        self.steps = trained * self.work.steps
        self.rates.append(trained * self.work.units / seconds)
        self.tell(f"{self.label}: {count(self.rates[-1])} {self.work.unit} per second")

    def score(self, counts: Count | None) -> Score:
        """What was measured."""
        assert self._started is not None
        return Score(
            workload=self.work.name,
            contestant=self.name,
            device=str(self.device),
            unit=self.work.unit,
            rate=statistics.median(self.rates),
            low=min(self.rates),
            high=max(self.rates),
            repeats=len(self.rates),
            steps=self.steps,
            start=self.begun,
            whole=self.epochs * self.work.units / self.seconds,
            peak_memory=self.peak,
            flops=None if counts is None else counts.flops,
            traffic=None if counts is None else counts.traffic,
            note="; ".join(filter(None, (self._started.note, self.work.note))),
        )

    def end(self) -> None:
        """Free everything, so that the next has the memory."""
        self._started = None
        collect(self.device)

    def _run(self, epochs: int) -> float:
        assert self._started is not None
        seconds = self._started.run(epochs)
        self.epochs += epochs
        self.pace = max(seconds / epochs, 1e-6)
        return seconds


def _counts(work: Workload, device: torch.device, tell: Tell) -> Count | None:
    """Operations and bytes of a unit; None where they cannot be counted."""
    try:
        return count_of(work, device)
    except (RuntimeError, NotImplementedError) as error:
        tell(f"{work.name} on {device}: operations are not counted: {_reason(error)}")
        return None
    finally:
        collect(device)


def failure(what: str, error: Exception, tell: Tell) -> str:
    """What failed and why, in a line that is told and recorded."""
    if os.environ.get("HOTLOOP_DEBUG"):
        traceback.print_exception(error)
    words = f"{what}: {_reason(error)}"
    tell(f"failed: {words}")
    return words


def _reason(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, HotloopError):
        return error.what if error.fix is None else f"{error.what} (fix: {error.fix})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def fresh_start(device: torch.device) -> None:
    """Forget what was compiled: torch recompiles a function only so often, then leaves it slow."""
    if compiler_is_loaded():
        torch.compiler.reset()
    collect(device)


def collect(device: torch.device) -> None:
    """Free what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
