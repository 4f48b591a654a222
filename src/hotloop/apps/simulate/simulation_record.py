"""What a simulation is asked to do (`Request`) and what it says (`Simulation`), as plain data."""

from dataclasses import dataclass, field
from typing import Any

from hotloop.apps.simulate.batch_setting import BatchSetting
from hotloop.apps.simulate.largest_batch import SearchResult
from hotloop.records import Record


@dataclass(frozen=True)
class Request(Record):
    """A script and a card."""

    script: str
    arguments: tuple[str, ...]
    card: dict[str, Any]
    steps: int = 3
    time_limit: float = 120.0
    listeners: tuple[str, ...] = ()  # told besides, as module:name, called with the card; one may keep the memory
    timed: bool = True  # whether the time of a step is foretold
    batch: BatchSetting | None = None  # that the script is to have; None: its own
    shortened: tuple[tuple[str, int], ...] = ()  # loops that only evaluate, by file and line: one round each
    whole: bool = False  # whether loops that only evaluate have all of their rounds
    silent: bool = False  # whether what the script prints is thrown away


@dataclass(frozen=True)
class DeviceFinding(Record):
    """Something that would go wrong, or slowly, on the GPU; files are told from where the script lies."""

    code: str  # such as mixed-devices
    level: str  # error or warning
    confidence: str  # shown: it happened here; suspected: it may
    file: str
    line: int
    function: str
    message: str
    fix: str
    count: int = 1


@dataclass(frozen=True)
class Copy(Record):
    """Copies between host and device at one line, in the whole simulation."""

    file: str
    line: int
    direction: str  # to the device, to the host
    bytes: int
    pinned: bool
    blocking: bool
    count: int


@dataclass(frozen=True)
class Sync(Record):
    """Waits of the host for the device at one line."""

    file: str
    line: int
    kind: str  # such as item, nonzero, synchronize
    count: int


@dataclass(frozen=True)
class ScriptLine(Record):
    """A line of the script's own code."""

    file: str
    line: int


@dataclass(frozen=True)
class Peak(Record):
    """The most memory that was in use at one moment, in bytes."""

    allocated: int  # live blocks
    reserved: int  # segments that the allocator holds
    process: int  # what the driver would show: reserved, the CUDA context and loaded modules


@dataclass(frozen=True)
class PeakInterval(Record):
    """Two peaks between which nine of ten measured ones lie, and why they are as far apart as they are."""

    low: Peak
    high: Peak
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PeakAt(Record):
    """Where the most was allocated."""

    file: str
    line: int
    function: str
    phase: str  # forward, backward, optimizer, other
    module: str  # path of the module, where that is known


@dataclass(frozen=True)
class Band(Record):
    """The bytes of a category over time."""

    category: str
    bytes: tuple[int, ...]  # at each point of the timeline


@dataclass(frozen=True)
class StepTime(Record):
    """Milliseconds of a step: never a bare number."""

    median: float
    low: float
    high: float
    calibrated: bool  # whether this GPU was measured


@dataclass(frozen=True)
class Batch(Record):
    """The batch of a script."""

    size: int | None  # that was set; None: the script has its own
    source: str  # where it was set, such as argument:--batch-size
    samples: int | None = None  # that a step learns from
    work: int = 0  # numbers that the forward pass of a step makes: they grow with the batch


COMPLETED, SHORT = "completed", "out-of-memory"  # these have a verdict on memory
SETTLED = 2  # steps from which on memory is known: the optimizer's state is there from the second on
FAILED, NO_STEPS, CUT, BEYOND = "failed", "no-steps", "cut-short", "not-simulated"  # and these do not
NO_GPU = "no-gpu"  # nor does this one: it trains on the CPU alone


@dataclass(frozen=True)
class Simulation(Record):
    """What a script would do on a GPU; of one that did not train, `status` says so and there is no verdict."""

    gpu: str
    steps: int  # that were asked for
    completed: int  # that ran
    status: str = COMPLETED  # or another of those above: how the script ended
    peak: Peak | None = None
    interval: PeakInterval | None = None  # of the peak
    categories: dict[str, int] = field(default_factory=dict)  # bytes at the peak: parameters, gradients, …
    modules: dict[str, int] = field(default_factory=dict)  # bytes of activations at the peak, by module
    timeline: tuple[tuple[int, int, int], ...] = ()  # (event, allocated, reserved), thinned; both peaks are kept
    bands: tuple[Band, ...] = ()  # the same by category, the context included
    step_ends: tuple[int, ...] = ()  # events after which each step had ended
    peak_at: PeakAt | None = None
    fits: bool | None = None
    largest_batch: int | None = None
    step_ms: StepTime | None = None  # without data and other work of the script on the host
    limited_by: str = ""  # device, launches or copies: without it a step would be the quickest
    findings: tuple[DeviceFinding, ...] = ()
    copies: tuple[Copy, ...] = ()
    syncs: tuple[Sync, ...] = ()
    notes: tuple[str, ...] = ()  # what it could not do, in sentences
    gpu_name: str = ""  # as the driver would say it
    gpu_memory: int | None = None  # bytes of the card
    batch: Batch | None = None
    shortened: tuple[ScriptLine, ...] = ()  # loops that only evaluate, and were ended after some of their rounds
    search: SearchResult | None = None  # how the largest batch was found
    error: str | None = None  # what ended the script before its steps were made, as Python shows it

    @property
    def trained(self) -> bool:
        """Whether it ran long enough for a verdict."""
        return self.status in (COMPLETED, SHORT)

    @property
    def samples_per_second(self) -> tuple[float, float, float] | None:
        """The median, and the interval, of the batch that it ran with; None where it is not known, or does not fit."""
        step, samples = self.step_ms, self.batch and self.batch.samples
        if self.fits is False or not step or not samples or step.low <= 0:
            return None
        return 1e3 * samples / step.median, 1e3 * samples / step.high, 1e3 * samples / step.low
