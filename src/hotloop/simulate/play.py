"""Host and device side by side: the host queues, the device works, copies and waits join them. Pure arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hotloop.simulate.cards import Card
from hotloop.simulate.events import DATA, Place
from hotloop.simulate.products import Part
from hotloop.simulate.table import ArchitectureTable, HostCost, default_host


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation is queued."""

    name: str
    parts: tuple[Part, ...]
    phase: str = "other"
    tensors: int = 0  # that a foreach or fused operation is given
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes go between host and device."""

    size: int
    pinned: bool
    blocking: bool
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """The host waits for the device."""

    kind: str
    place: Place | None = None


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
class PlayedStep:
    """One step, in seconds."""

    seconds: float
    busy: float  # the device computes
    copying: float
    host: float  # the host works; the rest of the time it waits


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
    busy: float = 0.0
    copying: float = 0.0
    worked: float = 0.0
    ready: float = 0.0  # when workers have made the next batch
    runs: list[DeviceSpan] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        self.host += seconds
        self.worked += seconds

    def occupy(self, seconds: float, number: int) -> None:
        """The device starts when it is free and the host has launched it."""
        start = max(self.host, self.device)
        self.device = start + seconds
        self.runs.append(DeviceSpan(number, self.host, start, self.device))

    def join(self) -> None:
        self.host = max(self.host, self.device)

    @property
    def now(self) -> float:
        return max(self.host, self.device)


Price = Callable[[Part], float]


def play(
    events: Sequence[Event], card: Card, table: ArchitectureTable, price: Price, *, host: HostCost | None = None
) -> tuple[list[PlayedStep], list[DeviceSpan]]:
    """The steps that a card makes of the events, and what its device did when.

    `price` gives the seconds of a part. What comes after the last mark is no whole step.
    """
    host = host or default_host()
    clocks, steps = _Clocks(), []
    last = replace(clocks)
    for number, event in enumerate(events):
        if isinstance(event, Launch):
            _launch(clocks, event, number, host, price)
        elif isinstance(event, Transfer):
            _transfer(clocks, event, number, card, table, host)
        elif isinstance(event, Wait):
            clocks.join()
            clocks.work(host.wait)
        elif isinstance(event, Pause):
            _pause(clocks, event, host)
        elif isinstance(event, Arrival):
            clocks.occupy(0.0, number)
        else:
            steps.append(_since(last, clocks))
            last = replace(clocks)
    return steps, clocks.runs


def _launch(clocks: _Clocks, event: Launch, number: int, host: HostCost, price: Price) -> None:
    clocks.work(_overhead(event.phase, host) + host.tensor * event.tensors)
    for part in event.parts:
        seconds = price(part)
        clocks.busy += seconds
        clocks.occupy(seconds, number)
        # The device is at the first kernel of a part while the host launches the others.
        clocks.work(host.launch * max(part.kernels - 1, 0))
        clocks.device = max(clocks.device, clocks.host) if part.kernels > 1 else clocks.device


def _pause(clocks: _Clocks, event: Pause, host: HostCost) -> None:
    """Workers are ahead of the host as long as they are quick enough; it waits for those that are not."""
    seconds = event.seconds * (host.loading if event.kind == DATA else host.working)
    if event.workers:
        clocks.ready += seconds / event.workers
        clocks.host = max(clocks.host, clocks.ready)
    else:
        clocks.work(seconds)


def _overhead(phase: str, host: HostCost) -> float:
    return {"forward": host.forward, "backward": host.backward, "optimizer": host.optimizer}.get(phase, host.other)


def _transfer(
    clocks: _Clocks, event: Transfer, number: int, card: Card, table: ArchitectureTable, host: HostCost
) -> None:
    """A copy from pageable memory keeps the host until it is done, whatever was asked for."""
    share = table.link.pinned if event.pinned else table.link.pageable
    seconds = table.link.latency + event.size / (card.pcie * share)
    clocks.work(host.copy)
    clocks.copying += seconds
    clocks.occupy(seconds, number)
    if event.blocking or not event.pinned:
        clocks.join()


def _since(last: _Clocks, now: _Clocks) -> PlayedStep:
    return PlayedStep(now.now - last.now, now.busy - last.busy, now.copying - last.copying, now.worked - last.worked)
