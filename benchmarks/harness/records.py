"""What the races measured, as plain data."""

from dataclasses import dataclass

from hotloop.records import Record

DEFAULT = "default"  # the name of a run for which no plan was given


@dataclass(frozen=True)
class Score(Record):
    """One contestant of a benchmark on one workload and device."""

    workload: str
    contestant: str
    device: str
    unit: str  # what is counted: rows, images, sprites, tokens
    rate: float  # units per second once it runs, the median
    low: float  # the slowest repeat
    high: float  # the fastest
    repeats: int
    steps: int  # updates of the weights in a repeat
    start: float  # seconds until it runs: set-up, warm-up, tuning, compilation
    whole: float  # units per second of everything, the start included
    peak_memory: int | None  # bytes on the device
    flops: float | None  # of one unit, forward and backward; counted, None where that is not possible
    traffic: float | None  # bytes that the operations of one unit read and write in plain PyTorch; counted
    note: str  # such as the plan that was chosen


@dataclass(frozen=True)
class Curves(Record):
    """The losses of the tutorial's loop and of the hot one, from the same weights and batches."""

    workload: str
    device: str
    steps: tuple[int, ...]
    tutorial: tuple[float, ...]
    hotloop: tuple[float, ...]
    again: tuple[float, ...]  # the tutorial's loop a second time with another rng state: what is noise


@dataclass(frozen=True)
class WholeRun(Record):
    """One `fit` with everything in it, from building the `Loop` to its report, beside the tutorial's loop."""

    given: str  # "default" where no plan was given, else the plan
    length: float  # seconds that the tutorial's loop was to take
    epochs: int
    items: int  # trained on, in all epochs
    tutorial: float  # seconds that the tutorial's loop takes for as many items, by its measured rate
    seconds: float  # that this took, by the wall clock
    warm: bool  # whether the caches on disk held what a run before it had put there
    plan: str  # at the end
    words: str  # the plan, for people
    tuning: str | None  # how it was found; None where none was looked for
    tuned: float  # seconds of the run in which plans were tried
    epoch: float | None  # seconds of an epoch once it had settled: the median of the last half
    losses: tuple[float, ...]  # of each epoch, the mean over its items
    peak_memory: int | None  # bytes on the device

    @property
    def gain(self) -> float:
        """Times as fast as the tutorial's loop."""
        return self.tutorial / self.seconds


@dataclass(frozen=True)
class EndToEnd(Record):
    """What a person gets on one workload: the tutorial's loop, what others write, and whole runs of `fit`."""

    workload: str
    device: str
    unit: str
    rate: float  # units per second of the tutorial's loop once it runs
    timed: float  # seconds from which that rate was taken
    items: int  # of an epoch
    losses: tuple[float, ...]  # of the tutorial's loop in each whole epoch that was timed
    peers: dict[str, float]  # units per second of other loops once they run, by name
    runs: tuple[WholeRun, ...]
    failures: tuple[str, ...]  # what could not run, and why
    note: str = ""  # how the workload differs from its full size

    def best_by_hand(self, length: float, *, warm: bool = False) -> WholeRun | None:
        """The fastest run of this length with a plan that was given; None where there was none."""
        given = [run for run in self.runs if run.given != DEFAULT and run.length == length and run.warm == warm]
        return max(given, key=lambda run: run.gain, default=None)

    def last_losses(self, run: WholeRun) -> tuple[int, float, float] | None:
        """The last epoch that both went through, the run's loss in it and the tutorial's; None where there is none."""
        common = min(len(run.losses), len(self.losses))
        if not common or run.items != run.epochs * self.items:  # its epochs are shorter
            return None
        return common, run.losses[common - 1], self.losses[common - 1]

    def default(self, length: float, *, warm: bool = False) -> WholeRun | None:
        """The run of this length in which nothing was said; None where it failed."""
        found = (run for run in self.runs if run.given == DEFAULT and run.length == length and run.warm == warm)
        return next(found, None)


@dataclass(frozen=True)
class Benchmark(Record):
    """A whole benchmark, as it was measured."""

    hardware: str
    command: str
    date: str  # ISO 8601, UTC
    commit: str | None
    versions: dict[str, str]
    scores: tuple[Score, ...]
    curves: tuple[Curves, ...]
    ceilings: dict[str, dict[str, float]]  # device → flops in each precision and bytes per second, as measured
    failures: tuple[str, ...]  # contestants that could not run, and why
    quick: bool = False  # tiny sizes, to see that it works: no figures to quote
    end_to_end: tuple[EndToEnd, ...] = ()
