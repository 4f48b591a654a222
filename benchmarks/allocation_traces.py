"""The allocator's model beside a real one: events that were recorded on a GPU are fed to it, and it must agree."""

import gzip
import json
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hotloop.apps.simulate.allocator import Allocator, Block, Full
from hotloop.errors import BadArgument
from hotloop.printing.text import printable, size
from hotloop.records import Record
from hotloop.records.files import write_whole

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "oom",
)  # in a file: their index
ELSEWHERE = 0x7FFF_0000_0000  # for segments that the real allocator did not make


class TraceEntry(NamedTuple):
    """One thing that an allocator did, as `torch.cuda.memory._snapshot()["device_traces"]` tells it."""

    action: str
    address: int
    size: int
    stream: int = 0


@dataclass(frozen=True)
class Trace:
    """What a real allocator did in a training, from the beginning of its process."""

    name: str
    room: int  # bytes that the process could have reserved
    cap: int | None  # that it was given
    peak: tuple[int, int] | None  # the most that was allocated and reserved, as the real one said at the end
    events: tuple[TraceEntry, ...]
    about: dict[str, Any] = field(default_factory=dict)  # hardware, versions, date


@dataclass(frozen=True)
class Difference(Record):
    """Where the model and the real allocator part."""

    event: int  # its place in the trace
    action: str
    size: int
    what: str  # reserved, address, or running out
    real: int
    model: int

    def __str__(self) -> str:
        said = f"{self.what} {self.model:,} instead of {self.real:,}"
        return f"event {self.event}, {self.action} of {size(self.size)}: {said}"


@dataclass(frozen=True)
class Replayed(Record):
    """A trace as the model had it."""

    name: str
    figures: tuple[tuple[int, int], ...]  # (allocated, reserved) after each allocation and free, by the model
    reserved: tuple[int, ...]  # the same, as it was
    peak: tuple[int, int]  # allocated, reserved, by the model
    real_peak: tuple[int, int] | None
    differences: dict[str, int]  # what → how often
    first: Difference | None

    @property
    def exact(self) -> bool:
        """Whether every block lay where it did, every segment came and went when it did, and the peaks are the same."""
        return not self.differences and self.real_peak in (None, self.peak)


def replay(trace: Trace) -> Replayed:
    """Feed a trace to the model, which decides for itself when to make a segment, when to release, when to give up.

    A trace has the sizes that were asked for, the addresses of blocks, and the segments. How large the blocks were it
    does not have; but where all lie at the same addresses, and the peaks agree, they were the same.
    """
    return _Replay(trace).run()


class _Replay:
    """The real allocator's state is kept by adding up; its segments say only where the driver put them."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.model = Allocator(trace.room, cap=trace.cap, addresses=self._place)
        self.blocks: dict[int, Block] = {}  # real address → the model's block
        self.made: deque[tuple[int, int]] = deque()  # segments that came before the next allocation
        self.released = False  # whether segments went before it
        self.reserved = 0
        self.elsewhere = ELSEWHERE
        self.figures: list[tuple[int, int]] = []
        self.real: list[int] = []
        self.differences: Counter[str] = Counter()
        self.first: Difference | None = None

    def run(self) -> Replayed:
        for number, event in enumerate(self.trace.events):
            if event.action == "segment_alloc":
                self.made.append((event.address, event.size))
                self.reserved += event.size
            elif event.action == "segment_free":
                self.released = True
                self.reserved -= event.size
            elif event.action == "oom":
                self._fail(number, event)
            elif event.action == "alloc":
                self._allocate(number, event)
                self._compare(number, event)
            elif event.address in self.blocks:  # what was there before the recording began is not known
                self._free(event)
                self._compare(number, event)
        gauges = self.model.all
        peak = gauges.allocated.most, gauges.reserved.most
        real_peak = self.trace.peak
        figures, reserved = tuple(self.figures), tuple(self.real)
        return Replayed(self.trace.name, figures, reserved, peak, real_peak, dict(self.differences), self.first)

    def _allocate(self, number: int, event: TraceEntry) -> None:
        # Segments went although there was room: somebody called `empty_cache`, which leaves no event of its own.
        if self.released and self.model.could_allocate(event.size):
            self.model.empty_cache()
        self.released = False
        try:
            block = self.model.allocate(event.size)
        except Full:  # the real one found room: go on with as much, so that what follows can be told
            self._differs(number, event, "running out", 0, 1)
            self.model.room, self.model.cap = 2**62, None
            block = self.model.allocate(event.size)
        if block.address != event.address:
            self._differs(number, event, "address", event.address, block.address)
        self.blocks[event.address] = block
        self.made.clear()

    def _free(self, event: TraceEntry) -> None:
        if event.action == "free_completed":  # at once: a recording has one stream
            self.model.free(self.blocks.pop(event.address))

    def _fail(self, number: int, event: TraceEntry) -> None:
        """The real one ran out; the model must, too."""
        self.released = False
        try:
            self.model.free(self.model.allocate(event.size))
        except Full:
            return
        self._differs(number, event, "running out", 1, 0)

    def _place(self, wanted: int) -> int:
        """Where the driver put the segment that the model makes now."""
        if self.made and self.made[0][1] == wanted:
            return self.made.popleft()[0]
        self.elsewhere += wanted
        return self.elsewhere - wanted

    def _compare(self, number: int, event: TraceEntry) -> None:
        self.figures.append((self.model.allocated, self.model.reserved))
        self.real.append(self.reserved)
        if self.model.reserved != self.reserved and not self.released:
            self._differs(number, event, "reserved", self.reserved, self.model.reserved)

    def _differs(self, number: int, event: TraceEntry, what: str, real: int, model: int) -> None:
        self.differences[what] += 1
        if self.first is None:
            self.first = Difference(number, event.action, event.size, what, real, model)


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace as compressed JSON: each event is a row of four numbers."""
    rows = [[ACTIONS.index(event.action), *event[1:]] for event in trace.events]
    head = {"name": trace.name, "room": trace.room, "cap": trace.cap, "peak": trace.peak, "about": trace.about}
    text = json.dumps({**head, "events": rows}, separators=(",", ":"))
    write_whole(path, gzip.compress(text.encode(), mtime=0))


def read_trace(path: Path) -> Trace:
    """Read what `write_trace` wrote."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        events = tuple(TraceEntry(ACTIONS[action], *rest) for action, *rest in data["events"])
        peak = data["peak"] and (data["peak"][0], data["peak"][1])
        return Trace(data["name"], data["room"], data["cap"], peak, events, data["about"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, zlib.error) as error:
        raise BadArgument(
            f"{printable(str(path))} holds no recorded allocations: {printable(str(error))}",
            fix="record some with benchmarks/record_allocations.py on a machine with a GPU",
        ) from error
