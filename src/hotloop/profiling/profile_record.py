"""`Profile`: where the time of some training steps went, as plain data. No torch here."""

from dataclasses import dataclass
from statistics import median_low

from hotloop.printing import markup
from hotloop.printing.text import duration, plural
from hotloop.records import Record

PARTS = ("data", "copies", "waits", "gaps", "communication", "compute")  # as they are listed everywhere
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")  # of memory, from the bottom up


@dataclass(frozen=True)
class TimeParts(Record):
    """A stretch of time in seconds, divided without overlap: the parts add up to the whole.

    On a GPU a moment counts by what the device does, and only where it does nothing by what the host does instead.
    """

    data: float = 0.0  # waiting for the next batch
    copies: float = 0.0  # the device copies between host and device, and computes nothing meanwhile
    waits: float = 0.0  # the device has nothing to do while the host is in a call that waits for it
    gaps: float = 0.0  # the device has nothing to do while the host prepares work; on a CPU: Python between operations
    communication: float = 0.0  # with other processes, and nothing is computed meanwhile
    compute: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def seconds(self) -> dict[str, float]:
        """The parts by name, in the order in which they are listed."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def shares(self) -> dict[str, float]:
        """The same as shares of the whole."""
        whole = self.total
        return {name: part / whole if whole else 0.0 for name, part in self.seconds.items()}

    def over(self, count: int) -> "TimeParts":
        """The same for one of `count`."""
        return TimeParts(**{name: part / count for name, part in self.seconds.items()})


@dataclass(frozen=True)
class Line(Record):
    """A line of the person's own code."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class OperationCost(Record):
    """One kind of operation that one line asks for."""

    name: str
    phase: str  # forward, backward, update; "CUDA graph" for a kernel of one that is replayed
    line: Line | None  # of a backward operation, the line of its forward; None where it is unknown
    seconds: float  # in a step: on the device, or on the CPU where that is the device
    share: float  # of the step's time
    calls: float  # in a step
    shapes: str  # of its tensors, as they were seen; "" where they are unknown


@dataclass(frozen=True)
class HostWait(Record):
    """A line at which the host waits for the device, or on a CPU would wait for one."""

    what: str  # in the person's words: .item(), .cpu()
    line: Line | None
    seconds: float  # in a step
    calls: float  # in a step


@dataclass(frozen=True)
class MemorySample(Record):
    """What was alive on the device at a moment of a step, in bytes."""

    seconds: float  # since the step began; it was looked at closely, and so took longer than a plain one
    phase: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    other: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in CATEGORIES)


@dataclass(frozen=True)
class Recommendation(Record):
    """What costs time, in a sentence, and what to do about it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Profile(Record):
    """Where the time of some training steps went, as it was measured."""

    name: str  # of the script or the loop
    device: str
    device_name: str
    date: str  # ISO 8601, UTC
    versions: dict[str, str]
    steps: int  # that were profiled
    skipped: int  # before them, as the warm-up
    seconds: tuple[float, ...]  # of each step
    plain: float | None  # the median step without the profiler; None where none was timed
    parts: TimeParts  # of all steps together
    data_known: bool  # whether batches came from a DataLoader; else waiting for data is among the gaps
    flops: dict[str, float]  # operations of a step by precision, counted; empty where that is unknown
    ceilings: dict[str, float]  # operations per second by precision and "bytes" per second; empty where not measured
    operations: tuple[OperationCost, ...]  # the costliest first
    waits: tuple[HostWait, ...]  # the longest first
    memory: tuple[MemorySample, ...]  # over one step; empty where it was not looked at
    peak_memory: int | None  # bytes on the device while it was profiled; None where the device does not tell
    advice: tuple[Recommendation, ...]
    notes: tuple[str, ...]  # what is unknown, and why
    replayed: float = 0.0  # seconds of `parts.compute` in which the device replayed CUDA graphs

    def __str__(self) -> str:
        """Where a step's time goes, the costliest lines and what to do, as text."""
        name = f" ({self.device_name})" if self.device_name and self.device_name != self.device else ""
        lines = [f"a step takes {duration(self.mean)} on {self.device}{name}, the mean of {plural(self.steps, 'step')}"]
        shares = [f"{part} {share:.0%}" for part, share in self.parts.shares.items() if share >= 0.005]
        lines.append(", ".join(shares) + (f", {self.replay_share:.0%} in CUDA graphs" if self.replayed else ""))
        for each in self.operations[:5]:
            lines.append(f"  {each.share:6.1%}  {each.name}, {each.phase}  {each.line or ''}".rstrip())
        lines += [f"{advice.what}\n  fix: {advice.fix}" for advice in self.advice]
        return "\n".join(lines)

    __repr__ = __str__  # the fields have every operation and every moment of the memory

    def _repr_html_(self) -> str:
        """What a notebook shows: the parts of a step as bars, the costliest lines and what to do."""
        parts, seconds = self.parts.shares, self.parts.over(self.steps).seconds if self.steps else {}
        rows = [
            (part, share, f"{share:.1%}, {duration(seconds.get(part))}")
            for part, share in parts.items()
            if share >= 0.0005
        ]
        costs = [
            [f"{each.share:.1%}", f"{each.name}, {each.phase}", each.line or "", each.line.code if each.line else ""]
            for each in self.operations[:5]
        ]
        header = ["share", "operation", "your line", ""]
        return markup.box(
            markup.line(str(self).partition("\n")[0], strong=True),
            markup.bars(rows, whole=1.0),
            markup.table(costs, header, words=(1, 2, 3)) if costs else "",
            *(markup.line(each.what) + markup.line(f"fix: {each.fix}", faint=True) for each in self.advice),
        )

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return median_low(self.seconds)

    @property
    def mean(self) -> float:
        """Seconds of a step on average."""
        return self.parts.total / self.steps

    @property
    def spread(self) -> tuple[float, float]:
        """The fastest and the slowest step."""
        return min(self.seconds), max(self.seconds)

    @property
    def replay_share(self) -> float:
        """The share of the time in which the device replayed CUDA graphs."""
        return self.replayed / self.parts.total if self.parts.total else 0.0

    @property
    def rate(self) -> float | None:
        """Operations per second, over all the time that steps take."""
        return sum(self.flops.values()) / self.mean if self.flops and self.mean else None

    @property
    def busy_rate(self) -> float | None:
        """Operations per second while it computes."""
        computing = self.parts.compute / self.steps
        return sum(self.flops.values()) / computing if self.flops and computing else None

    @property
    def ceiling(self) -> float | None:
        """Operations per second that the device reached in large matmuls, in this step's mixture of precisions."""
        if not self.flops or any(not self.ceilings.get(precision) for precision in self.flops):
            return None
        return sum(self.flops.values()) / sum(count / self.ceilings[name] for name, count in self.flops.items())
