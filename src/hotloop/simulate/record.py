"""`Simulation`: what would happen on a GPU that is not here, as plain data."""

from dataclasses import dataclass, field

from hotloop.records import Record


@dataclass(frozen=True)
class Finding(Record):
    """Something that would go wrong, or slowly, on the GPU; files are told from where the script lies."""

    code: str  # such as mixed-devices
    level: str  # error, warning or info
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
class Peak(Record):
    """The most memory that was in use at one moment, in bytes."""

    allocated: int  # live blocks
    reserved: int  # segments that the allocator holds
    process: int  # what the driver would show: reserved, the CUDA context and loaded modules


@dataclass(frozen=True)
class StepTime(Record):
    """Milliseconds of a step: never a bare number."""

    median: float
    low: float
    high: float
    calibrated: bool  # whether this GPU was measured


@dataclass(frozen=True)
class Simulation(Record):
    """What a script would do on a GPU."""

    gpu: str
    steps: int  # that were asked for
    completed: int  # that ran
    peak: Peak | None = None
    categories: dict[str, int] = field(default_factory=dict)  # bytes at the peak: parameters, gradients, …
    modules: dict[str, int] = field(default_factory=dict)  # bytes of activations at the peak, by module
    timeline: tuple[tuple[int, int, int], ...] = ()  # (event, allocated, reserved), thinned
    fits: bool | None = None
    largest_batch: int | None = None
    step_ms: StepTime | None = None
    findings: tuple[Finding, ...] = ()
    copies: tuple[Copy, ...] = ()
    syncs: tuple[Sync, ...] = ()
    notes: tuple[str, ...] = ()  # what it could not do, in sentences
    error: str | None = None  # what ended the script before its steps were made, as Python shows it
