"""`Time`: listens to a simulation and tells how long a step would take on a card, and what takes it."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.cost import seconds_of
from hotloop.apps.simulate.events import Listener, Operation
from hotloop.apps.simulate.families import kind_of
from hotloop.apps.simulate.products import WorkPart
from hotloop.apps.simulate.simulation_record import StepTime
from hotloop.apps.simulate.table import ArchitectureTable, HostCost, Link, default_host, load
from hotloop.apps.simulate.work import parts_of, switches
from hotloop.placement.sites import Site

SURE = 1.2816  # of a normal distribution, this many deviations to each side hold four cases of five
_AKIN = 1.5  # errors are larger by this on another card of the architecture that was measured
_TOGETHER = 0.3  # of an error is shared by all operations of a family on a card that was measured, the rest its own
_AROUND = 150  # tensors of an optimizer's operation: what a step costs the host beside its operations takes as long
_BESIDE = ("copy", "wait")
_LAUNCHING = ("forward", "backward", "optimizer", "other", "tensor", "launch")


# What happens, and two clocks: the host queues, the device works, copies and waits join them


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation is queued."""

    parts: tuple[WorkPart, ...]
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
class Mark:
    """An optimizer has made a step."""


Event = Launch | Transfer | Wait | Mark


@dataclass
class _Clocks:
    host: float = 0.0
    device: float = 0.0

    def occupy(self, seconds: float) -> None:
        """The device starts when it is free and the host has launched it."""
        self.device = self.now + seconds

    @property
    def now(self) -> float:
        return max(self.host, self.device)


Price = Callable[[WorkPart], float]


def play(
    events: Sequence[Event], card: Card, table: ArchitectureTable, price: Price, *, host: HostCost | None = None
) -> list[float]:
    """The seconds of each step that a card makes of the events.

    `price` gives the seconds of a part. What comes after the last mark is no whole step.
    """
    host = host or default_host()
    clocks, steps, last = _Clocks(), [], 0.0
    for event in events:
        if isinstance(event, Launch):
            _launch(clocks, event, host, price)
        elif isinstance(event, Transfer):
            _transfer(clocks, event, card, table, host)
        elif isinstance(event, Wait):
            clocks.host = clocks.now + host.wait
        else:
            steps.append(clocks.now - last)
            last = clocks.now
    return steps


def _launch(clocks: _Clocks, event: Launch, host: HostCost, price: Price) -> None:
    clocks.host += getattr(host, event.phase) + host.tensor * event.tensors
    for part in event.parts:
        clocks.occupy(price(part))
        # The device is at the first kernel of a part while the host launches the others.
        clocks.host += host.launch * max(part.kernels - 1, 0)
        clocks.device = max(clocks.device, clocks.host) if part.kernels > 1 else clocks.device


def _transfer(clocks: _Clocks, event: Transfer, card: Card, table: ArchitectureTable, host: HostCost) -> None:
    """A copy from pageable memory keeps the host until it is done, whatever was asked for."""
    share = table.link.pinned if event.pinned else table.link.pageable
    clocks.host += host.copy
    clocks.occupy(table.link.latency + event.size / (card.pcie * share))
    if event.blocking or not event.pinned:
        clocks.host = clocks.now


# What that says of a step


@dataclass(frozen=True)
class Forecast:
    """How long a step takes on a card."""

    step: StepTime
    limited_by: str  # device, launches or copies: without it a step would be the quickest
    notes: tuple[str, ...] = ()


class Time(Listener):
    """Keeps what happened, and tells how long a step of it takes on a card."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.events: list[Event] = []
        self.notes: list[str] = []
        self._loads = [0.0]  # seconds of the batches of each step

    def after(self, operation: Operation) -> None:
        kind = kind_of(operation.name)
        unknown = f"{operation.name} is not known: its time is that of reading and writing its tensors"
        if not kind.known and unknown not in self.notes:
            self.notes.append(unknown)
        parts = parts_of(operation, switches())
        if not parts:  # a view, or a copy to or from the host, which `copied` tells
            return
        tensors = len(operation.inputs) // max(kind.lists, 1) if kind.family.startswith("optimizer") else 0
        self.events.append(Launch(parts, operation.phase, tensors))

    def copied(self, size: int, direction: str, *, pinned: bool, blocking: bool, place: Site | None) -> None:
        self.events.append(Transfer(size, pinned, blocking))

    def waited(self, kind: str, place: Site | None) -> None:
        self.events.append(Wait())

    def loaded(self, seconds: float, workers: int) -> None:
        self._loads[-1] += seconds / max(workers, 1)

    def step(self) -> None:
        # Wrappers of optimizer and backward pass, gradients set to None, the person's own loop: a small net shows them.
        self.events.append(Launch((), "optimizer", _AROUND))
        self.events.append(Mark())
        self._loads.append(0.0)

    def to_record(self) -> dict[str, Any]:
        """What a `Simulation` has of time, by the names of its fields."""
        found = forecast(self, self.card)
        if found is None:
            return {}
        notes, loads = found.notes, 1e3 * statistics.median(self._loads[1:-1] or [0.0])
        if loads > found.step.high:
            notes = (*notes, f"the GPU waits for data: batches take {loads:.3g} ms a step on this machine")
        return {"step_ms": found.step, "limited_by": found.limited_by, "notes": notes}


def forecast(
    time: Time, card: Card, table: ArchitectureTable | None = None, *, host: HostCost | None = None
) -> Forecast | None:
    """How long a step of what was heard takes on a card, or None where no step was made."""
    player = _Player(time.events, card, table or load(card.architecture), host)
    if not player.steps():
        return None
    median = player.seconds()
    low, high = player.interval(median)
    step = StepTime(1e3 * median, 1e3 * low, 1e3 * high, player.table.card == card.key)
    return Forecast(step, player.bound(), (*time.notes, *player.notes()))


class _Player:
    """What happened on one card, played as often as a question needs."""

    def __init__(self, events: list[Event], card: Card, table: ArchitectureTable, host: HostCost | None) -> None:
        self.card, self.table, self.steady = card, table, _steady(events)
        self.alone = events.count(Mark()) == 1
        self.hosted = host or default_host()
        self.launches = [event for event in self.steady if isinstance(event, Launch)]
        parts = {part for launch in self.launches for part in launch.parts}
        self.prices = {part: seconds_of(part, card, table) for part in parts}
        self.spreads = self._spreads()

    def _spreads(self) -> dict[str, float]:
        """Of each family as a whole: what many unlike operations are off by evens out in part."""
        shared = _TOGETHER if self.table.card else 1.0
        taken: dict[str, dict[WorkPart, float]] = defaultdict(lambda: defaultdict(float))
        for launch in self.launches:
            for part in launch.parts:
                taken[part.family][part] += self.prices[part]
        spreads = {}
        for family, seconds in taken.items():
            off = [self.table.curve(part).spread * each for part, each in seconds.items()]
            squared = shared * sum(off) ** 2 + (1 - shared) * sum(each**2 for each in off)
            spreads[family] = math.sqrt(squared) / max(sum(seconds.values()), 1e-30)
        return spreads

    def steps(
        self, price: Price | None = None, table: ArchitectureTable | None = None, host: HostCost | None = None
    ) -> list[float]:
        """Seconds of those of the second time round: the first begins with an idle device, as no later one does."""
        events, chosen = [*self.steady, *self.steady], price or self.prices.__getitem__
        steps = play(events, self.card, table or self.table, chosen, host=host or self.hosted)
        return steps[len(steps) // 2 :]

    def seconds(
        self, price: Price | None = None, table: ArchitectureTable | None = None, host: HostCost | None = None
    ) -> float:
        return statistics.median_low(self.steps(price, table, host))

    def interval(self, median: float) -> tuple[float, float]:
        """Four cases of five: each family is off as a whole, families independently of one another."""
        wider = 1.0 if self.table.card in ("", self.card.key) else _AKIN
        sides = []
        for sign in (-1.0, 1.0):
            factors = {name: math.exp(sign * wider * spread) for name, spread in self.spreads.items()}
            moved = [self._scaled(name, factor) for name, factor in factors.items()]
            moved.append(self._scaled(None, math.exp(sign * wider * self.table.common)))
            moved.append(self.seconds(host=_times(self.hosted, math.exp(sign * self.hosted.spread))))
            factor = math.exp(-sign * self.table.link.spread)  # a quicker link is a shorter step
            link = replace(
                self.table.link, pinned=self.table.link.pinned * factor, pageable=self.table.link.pageable * factor
            )
            moved.append(self.seconds(table=replace(self.table, link=link)))
            sides.append(math.sqrt(sum((seconds - median) ** 2 for seconds in moved)))
        # In proportion, so that a very unsure time never becomes a negative one.
        shorter, longer = (SURE * side / median if median else 0.0 for side in sides)
        return median * math.exp(-shorter), median * (1 + longer)

    def _scaled(self, family: str | None, factor: float) -> float:
        def price(part: WorkPart) -> float:
            return self.prices[part] * (factor if family in (None, part.family) else 1.0)

        return self.seconds(price)

    def bound(self) -> str:
        """What would quicken a step most if it took no time."""
        host, free = self.hosted, replace(self.table, link=Link(pinned=math.inf, pageable=math.inf, latency=0.0))
        without = {
            "device": self.seconds(lambda _: 0.0),
            "launches": self.seconds(host=_times(host, 0.0, _LAUNCHING)),
            "copies": self.seconds(table=free, host=replace(host, copy=0.0)),
        }
        return min(without, key=without.__getitem__)

    def notes(self) -> list[str]:
        notes = []
        if self.card.generic:
            notes.append("only the memory of the card is known: its speed is that of one of about its size")
        if not self.table.card:
            notes.append(f"no {self.card.architecture} card was measured: its times are a rule of thumb")
        elif self.table.card != self.card.key:
            notes.append(f"times are those of the {self.table.card}, scaled to what the {self.card.name} can do")
        if self.alone:
            notes.append("only one step was made: its time holds what happens once, such as making the model")
        if self.hosted.name:
            notes.append(f"what an operation costs the host was measured on {self.hosted.name}, for every GPU")
        return notes


def _steady(events: list[Event]) -> list[Event]:
    """What happens in whole steps after the first; in the first where there is no other."""
    marks = [number for number, event in enumerate(events) if isinstance(event, Mark)]
    if not marks:
        return []
    first = marks[0] + 1 if len(marks) > 1 else 0
    return events[first : marks[-1] + 1]


def _times(host: HostCost, factor: float, names: tuple[str, ...] = (*_LAUNCHING, *_BESIDE)) -> HostCost:
    """A host that is slower by a factor in what is named."""
    return replace(host, **{name: getattr(host, name) * factor for name in names})
