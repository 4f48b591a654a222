"""Host and device side by side: the host queues, the device works, copies and waits join them. Pure arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import DATA
from hotloop.apps.simulate.products import Part
from hotloop.apps.simulate.table import ArchitectureTable, HostCost, default_host


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation is queued."""

    parts: tuple[Part, ...]
    phase: str = "other"  # by which `HostCost` knows what it costs the host
    tensors: int = 0  # that a foreach or fused operation is given


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes go between host and device."""

    size: int
    pinned: bool
    blocking: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """The host waits for the device."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The host does something else."""

    seconds: float
    kind: str = DATA  # or WORK
    workers: int = 0  # that make the batches beside it


@dataclass(frozen=True, slots=True)
class Arrival:
    """A parameter got its gradient."""

    size: int  # bytes
    module: str = ""  # in whose backward it was made


@dataclass(frozen=True, slots=True)
class Mark:
    """An optimizer has made a step."""


Event = Launch | Transfer | Wait | Pause | Arrival | Mark


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """A stretch of the device's time, for whoever looks closely."""

    event: int  # index into the events
    queued: float  # when the host had launched it
    start: float
    end: float


@dataclass
class _Clocks:
    host: float = 0.0
    device: float = 0.0
    ready: float = 0.0  # when workers have made the next batch
    runs: list[DeviceSpan] = field(default_factory=list)

    def occupy(self, seconds: float, number: int) -> None:
        """The device starts when it is free and the host has launched it."""
        start = self.now
        self.device = start + seconds
        self.runs.append(DeviceSpan(number, self.host, start, self.device))

    @property
    def now(self) -> float:
        return max(self.host, self.device)


Price = Callable[[Part], float]


def play(
    events: Sequence[Event], card: Card, table: ArchitectureTable, price: Price, *, host: HostCost | None = None
) -> tuple[list[float], list[DeviceSpan]]:
    """The seconds of each step that a card makes of the events, and what its device did when.

    `price` gives the seconds of a part. What comes after the last mark is no whole step.
    """
    host = host or default_host()
    clocks, steps, last = _Clocks(), [], 0.0
    for number, event in enumerate(events):
        if isinstance(event, Launch):
            _launch(clocks, event, number, host, price)
        elif isinstance(event, Transfer):
            _transfer(clocks, event, number, card, table, host)
        elif isinstance(event, Wait):
            clocks.host = clocks.now + host.wait
        elif isinstance(event, Pause):
            _pause(clocks, event, host)
        elif isinstance(event, Arrival):
            clocks.occupy(0.0, number)
        else:
            steps.append(clocks.now - last)
            last = clocks.now
    return steps, clocks.runs


def _launch(clocks: _Clocks, event: Launch, number: int, host: HostCost, price: Price) -> None:
    clocks.host += getattr(host, event.phase) + host.tensor * event.tensors
    for part in event.parts:
        clocks.occupy(price(part), number)
        # The device is at the first kernel of a part while the host launches the others.
        clocks.host += host.launch * max(part.kernels - 1, 0)
        clocks.device = max(clocks.device, clocks.host) if part.kernels > 1 else clocks.device


def _pause(clocks: _Clocks, event: Pause, host: HostCost) -> None:
    """Workers are ahead of the host as long as they are quick enough; it waits for those that are not."""
    seconds = event.seconds * (host.loading if event.kind == DATA else host.working)
    if event.workers:
        clocks.ready += seconds / event.workers
        clocks.host = max(clocks.host, clocks.ready)
    else:
        clocks.host += seconds


def _transfer(
    clocks: _Clocks, event: Transfer, number: int, card: Card, table: ArchitectureTable, host: HostCost
) -> None:
    """A copy from pageable memory keeps the host until it is done, whatever was asked for."""
    share = table.link.pinned if event.pinned else table.link.pageable
    clocks.host += host.copy
    clocks.occupy(table.link.latency + event.size / (card.pcie * share), number)
    if event.blocking or not event.pinned:
        clocks.host = clocks.now
