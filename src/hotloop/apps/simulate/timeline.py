"""`Time`: listens to a simulation and tells how long a step would take on a card, and what takes it."""

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.cost import seconds_of
from hotloop.apps.simulate.events import DATA, WORK, Listener, Operation
from hotloop.apps.simulate.families import kind_of
from hotloop.apps.simulate.play import Arrival, Event, Launch, Mark, Pause, Price, Transfer, Wait, play
from hotloop.apps.simulate.products import Part
from hotloop.apps.simulate.scaling import GradientReady, RankStep
from hotloop.apps.simulate.simulation_record import StepPace, StepTime
from hotloop.apps.simulate.table import ArchitectureTable, HostCost, Link, default_host, load
from hotloop.apps.simulate.work import parts_of, switches
from hotloop.placement.sites import Site
from hotloop.records import Record

SURE = 1.2816  # of a normal distribution, this many deviations to each side hold four cases of five
_AKIN = 1.5  # errors are larger by this on another card of the architecture that was measured
_TOGETHER = 0.3  # of an error is shared by all operations of a family on a card that was measured, the rest its own
_AROUND = 150  # tensors of an optimizer's operation: what a step costs the host beside its operations takes as long
_BESIDE = ("copy", "wait", "loading", "working")
_LAUNCHING = ("forward", "backward", "optimizer", "other", "tensor", "launch")


@dataclass(frozen=True)
class Forecast(Record):
    """How long a step takes on a card."""

    step: StepTime
    pace: StepPace  # the step with data and the script's own work on the host
    notes: tuple[str, ...] = ()
    rank: RankStep | None = None  # the step in its parts, for what several GPUs would do


class Time(Listener):
    """Keeps what happened, and tells how long a step of it takes on a card."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.events: list[Event] = []
        self.notes: list[str] = []
        self.host_cost: HostCost | None = None  # of the machine at hand, where it was measured
        self._sizes: dict[int, int] = {}  # bytes of what is allocated
        self._module = ""  # of the last operation of the backward pass

    def allocated(self, key: int, size: int, kind: str) -> None:
        """Memory takes no time, but a gradient is when ranks can begin to exchange it."""
        self._sizes[key] = size
        self.named(key, kind)

    def freed(self, key: int) -> None:
        self._sizes.pop(key, None)

    def named(self, key: int, kind: str) -> None:
        if kind == "gradient" and key in self._sizes:
            self.events.append(Arrival(self._sizes[key], self._module))

    def after(self, operation: Operation) -> None:
        if operation.phase == "backward" and operation.module:
            self._module = operation.module
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

    def host(self, seconds: float, kind: str = "data", workers: int = 0) -> None:
        self.events.append(Pause(seconds, kind, workers))

    def step(self) -> None:
        # Wrappers of optimizer and backward pass, gradients set to None, the person's own loop: a small net shows them.
        self.events.append(Launch((), "optimizer", _AROUND))
        self.events.append(Mark())

    def to_record(self) -> dict[str, Any]:
        """What a `Simulation` has of time, by the names of its fields."""
        found = forecast(self, self.card, host=self.host_cost)
        if found is None:
            return {}
        return {"step_ms": found.step, "pace": found.pace, "rank": found.rank, "notes": found.notes}


def forecast(
    time: Time, card: Card, table: ArchitectureTable | None = None, *, host: HostCost | None = None
) -> Forecast | None:
    """How long a step of what was heard takes on a card, or None where no step was made."""
    player = _Player(time.events, card, table or load(card.architecture), host)
    if not player.steps():
        return None
    step = player.told(player.hosted)
    return Forecast(step, player.pace(step), (*time.notes, *player.notes()), player.rank(time.events))


class _Player:
    """What happened on one card, played as often as a question needs."""

    def __init__(self, events: list[Event], card: Card, table: ArchitectureTable, host: HostCost | None) -> None:
        self.card, self.table, self.steady = card, table, _steady(events)
        self.hosted = host or default_host()
        self.kept = replace(self.hosted, loading=1.0, working=1.0)  # as the script keeps it
        if self.steady.alone:  # the first step holds what happens once
            self.kept = self.hosted
        parts = {part for launch in self.steady.launches for part in launch.parts}
        self.prices = {part: seconds_of(part, card, table) for part in parts}
        self.spreads = self._spreads()

    def _spreads(self) -> dict[str, float]:
        """Of each family as a whole: what many unlike operations are off by evens out in part."""
        shared = _TOGETHER if self.table.card else 1.0
        taken: dict[str, dict[Part, float]] = defaultdict(lambda: defaultdict(float))
        for launch in self.steady.launches:
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
        events, chosen = [*self.steady.events, *self.steady.events], price or self.prices.__getitem__
        steps, _ = play(events, self.card, table or self.table, chosen, host=host or self.hosted)
        return steps[len(steps) // 2 :]

    def seconds(
        self, price: Price | None = None, table: ArchitectureTable | None = None, host: HostCost | None = None
    ) -> float:
        steps = self.steps(price, table, host)
        if host is not None and (host.loading or host.working):  # no two batches take the same time: a slow one counts
            return statistics.fmean(steps)
        return statistics.median_low(steps)

    def told(self, host: HostCost) -> StepTime:
        """The time of a step with its interval."""
        median = self.seconds(host=host)
        low, high = self.interval(median, host)
        return StepTime(1e3 * median, 1e3 * low, 1e3 * high, self.table.card == self.card.key)

    def pace(self, step: StepTime) -> StepPace:
        """The same with what the script does on the host, if it does anything."""
        pauses = [] if self.steady.alone else self.steady.pauses
        data, work = ([event for event in pauses if event.kind == kind] for kind in (DATA, WORK))
        told = self.told(self.kept) if pauses else step
        data_ms, work_ms = (1e3 * sum(each.seconds for each in some) / self.steady.steps for some in (data, work))
        return StepPace(told, data_ms, work_ms, max((each.workers for each in data), default=0), self.bound())

    def interval(self, median: float, hosted: HostCost) -> tuple[float, float]:
        """Four cases of five: each family is off as a whole, families independently of one another."""
        wider = 1.0 if self.table.card in ("", self.card.key) else _AKIN
        sides = []
        for sign in (-1.0, 1.0):
            factors = {name: math.exp(sign * wider * spread) for name, spread in self.spreads.items()}
            moved = [self._scaled(name, factor, hosted) for name, factor in factors.items()]
            moved.append(self._scaled(None, math.exp(sign * wider * self.table.common), hosted))
            moved.append(self.seconds(host=_times(hosted, math.exp(sign * hosted.spread))))
            factor = math.exp(-sign * self.table.link.spread)  # a quicker link is a shorter step
            link = replace(
                self.table.link, pinned=self.table.link.pinned * factor, pageable=self.table.link.pageable * factor
            )
            moved.append(self.seconds(table=replace(self.table, link=link), host=hosted))
            sides.append(math.sqrt(sum((seconds - median) ** 2 for seconds in moved)))
        # In proportion, so that a very unsure time never becomes a negative one.
        shorter, longer = (SURE * side / median if median else 0.0 for side in sides)
        return median * math.exp(-shorter), median * (1 + longer)

    def _scaled(self, family: str | None, factor: float, host: HostCost) -> float:
        def price(part: Part) -> float:
            return self.prices[part] * (factor if family in (None, part.family) else 1.0)

        return self.seconds(price, host=host)

    def bound(self) -> str:
        """What would quicken the pace most if it took no time."""
        host, free = self.kept, replace(self.table, link=Link(pinned=math.inf, pageable=math.inf, latency=0.0))
        without = {
            "device": self.seconds(lambda _: 0.0, host=host),
            "launches": self.seconds(host=_times(host, 0.0, _LAUNCHING)),
            "copies": self.seconds(table=free, host=replace(host, copy=0.0)),
            DATA: self.seconds(host=replace(host, loading=0.0)),
            WORK: self.seconds(host=replace(host, working=0.0)),
        }
        return min(without, key=without.__getitem__)

    def rank(self, every: list[Event]) -> RankStep | None:
        """The step in its parts; None where no backward pass was seen.

        Gradients that stay from step to step come in the first one only: of those the order is known, and not when.
        """
        events = [*self.steady.events, *self.steady.events]
        steps, spans = play(events, self.card, self.table, self.prices.__getitem__, host=self.hosted)
        marks = [-1, *(number for number, event in enumerate(events) if isinstance(event, Mark))]
        chosen = statistics.median_low(steps[len(steps) // 2 :])
        number = steps.index(chosen, len(steps) // 2)
        begin = sum(steps[:number])
        of_step = [(events[s.event], s) for s in spans if marks[number] < s.event < marks[number + 1]]
        backward = [span for event, span in of_step if isinstance(event, Launch) and event.phase == "backward"]
        if not backward:
            return None
        start, end = min(span.start for span in backward), max(span.end for span in backward)
        taken = max(end - start, 1e-12)
        came = [(event, (span.end - start) / taken) for event, span in of_step if isinstance(event, Arrival)]
        if not came:
            first = [event for event in every if isinstance(event, Arrival)]
            came = [(event, number / len(first)) for number, event in enumerate(first, 1)]
        return RankStep(
            forward=max(start - begin, 0.0),
            backward=taken,
            update=max(begin + chosen - end, 0.0),
            gradients=tuple(
                GradientReady(event.size, min(max(ready, 0.0), 1.0), repeated_block(event.module))
                for event, ready in came
            ),
        )

    def notes(self) -> list[str]:
        notes = []
        if self.card.generic:
            notes.append("only the memory of the card is known: its speed is that of one of about its size")
        if not self.table.card:
            notes.append(f"no {self.card.architecture} card was measured: its times are a rule of thumb")
        elif self.table.card != self.card.key:
            notes.append(f"times are those of the {self.table.card}, scaled to what the {self.card.name} can do")
        if self.steady.alone:
            notes.append("only one step was made: its time holds what happens once, such as making the model")
        if self.hosted.name:
            notes.append(f"what an operation costs the host was measured on {self.hosted.name}, for every GPU")
        return notes


def repeated_block(module: str) -> str:
    """The block of a model that a module is in, by its path: the item of a list that has modules of its own.

    >>> repeated_block("transformer.h.3.attn.c_proj"), repeated_block("layers.2"), repeated_block("head")
    ('transformer.h.3', '', '')
    """
    path = module.split(".")
    number = next((n for n, name in enumerate(path[:-1]) if name.isdecimal()), None)
    return "" if number is None else ".".join(path[: number + 1])


@dataclass(frozen=True)
class _Steady:
    events: list[Event]
    steps: int
    alone: bool = False  # there was but one

    @property
    def pauses(self) -> list[Pause]:
        return [event for event in self.events if isinstance(event, Pause)]

    @property
    def launches(self) -> list[Launch]:
        return [event for event in self.events if isinstance(event, Launch)]


def _steady(events: list[Event]) -> _Steady:
    """What happens in whole steps after the first; in the first where there is no other."""
    marks = [number for number, event in enumerate(events) if isinstance(event, Mark)]
    if not marks:
        return _Steady([], 1)
    first = marks[0] + 1 if len(marks) > 1 else 0
    return _Steady(events[first : marks[-1] + 1], max(len(marks) - 1, 1), alone=len(marks) == 1)


def _times(host: HostCost, factor: float, names: tuple[str, ...] = (*_LAUNCHING, *_BESIDE)) -> HostCost:
    """A host that is slower by a factor in what is named."""
    return HostCost.from_json({**host.to_json(), **{name: getattr(host, name) * factor for name in names}})
