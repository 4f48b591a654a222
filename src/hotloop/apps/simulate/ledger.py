"""Whose the allocated bytes are, now and at the peak, and how they went over time."""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.findings import relative
from hotloop.apps.simulate.simulation_record import PeakAt

CATEGORIES = {  # what the engine calls a memory → where it is counted
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "input": "inputs",
    "buffer": "buffers",
    "temporary": "temporaries",
    "workspace": "workspaces",
}
POINTS = 160  # of a timeline, at least; at most twice as many


class Point(NamedTuple):
    """How things stood at one moment, for the stretch of events around it."""

    event: int
    allocated: int
    reserved: int  # the most of the stretch
    kinds: dict[str, int]  # whose the bytes were


class Timeline:
    """Memory over the events that changed it, thinned as they come.

    Of neighbours the highest is kept, with the most that was reserved meanwhile: so both peaks are always there.
    """

    def __init__(self, points: int = POINTS) -> None:
        self.events = 0
        self.step_ends: list[int] = []  # events after which a step had ended
        self._points = points
        self._kept: list[Point] = []
        self._stride = 1
        self._highest: Point | None = None  # of the stretch that has begun
        self._reserved = 0

    def add(self, allocated: int, reserved: int, kinds: Mapping[str, int] | None = None) -> None:
        self.events += 1
        self._reserved = max(self._reserved, reserved)
        if self._highest is None or allocated > self._highest.allocated:
            self._highest = Point(self.events, allocated, reserved, dict(kinds or {}))
        if self.events % self._stride == 0:
            self._kept.append(self._highest._replace(reserved=self._reserved))
            self._highest, self._reserved = None, 0
            if len(self._kept) >= 2 * self._points:
                self._kept = [_higher(*pair) for pair in zip(self._kept[::2], self._kept[1::2], strict=True)]
                self._stride *= 2

    def rename(self, old: str, new: str, size: int, since: int) -> None:
        """What came with the event `since` and is still there turned out to be something else, all the time."""
        for point in reversed(self._all()):
            if point.event < since:
                break
            point.kinds[old] = point.kinds.get(old, 0) - size
            point.kinds[new] = point.kinds.get(new, 0) + size

    def end_step(self) -> None:
        self.step_ends.append(self.events)

    def points(self) -> tuple[tuple[int, int, int], ...]:
        """(event, allocated, reserved), in order."""
        return tuple(point[:3] for point in self._all())

    def bands(self) -> dict[str, tuple[int, ...]]:
        """The bytes of each category at the points; a category that never has any is left out."""
        kept = [_by_category(point.kinds) for point in self._all()]
        names = dict.fromkeys(name for categories in kept for name in categories)
        return {name: tuple(categories.get(name, 0) for categories in kept) for name in names}

    def at_peak(self) -> dict[str, int]:
        """The bytes of each category when the most was allocated."""
        return _by_category(max(self._all(), key=lambda point: point.allocated).kinds) if self.events else {}

    def _all(self) -> list[Point]:
        open_end = [] if self._highest is None else [self._highest._replace(reserved=self._reserved)]
        return [*self._kept, *open_end]


def _by_category(kinds: Mapping[str, int]) -> dict[str, int]:
    return {CATEGORIES.get(kind, kind): amount for kind, amount in kinds.items() if amount}


def _higher(first: Point, second: Point) -> Point:
    """The higher of two neighbours, which then stands for both."""
    higher = second if second.allocated > first.allocated else first
    return higher._replace(reserved=max(first.reserved, second.reserved))


class Ledger:
    """Bytes by kind and by module. How they were at the peak is noted when it is left, not at each step up."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.modules: Counter[str] = Counter()  # of activations alone
        self.peak = 0
        self.peak_operation: Operation | None = None  # that made it
        self._at_peak: dict[str, int] = {}
        self._rising = False

    def add(self, kind: str, module: str, size: int) -> None:
        self.now[kind] += size
        if kind == "activation":
            self.modules[module] += size

    def remove(self, kind: str, module: str, size: int) -> None:
        if self._rising:
            self._keep()
        self.now[kind] -= size
        if kind == "activation":
            self.modules[module] -= size

    def rename(self, old: str, new: str, module: str, size: int) -> None:
        """What is there turned out to be something else, and was so at the peak, too."""
        rising, self._rising = self._rising, False
        self.remove(old, module, size)
        self.add(new, module, size)
        self._rising = rising

    def saw(self, allocated: int, operation: Operation | None) -> None:
        """So much is allocated now."""
        if allocated > self.peak:
            self.peak, self.peak_operation = allocated, operation
            self._rising = True

    def modules_at_peak(self) -> dict[str, int]:
        """Bytes of activations, the largest first."""
        if self._rising:
            self._keep()
        return self._at_peak

    def peak_at(self) -> PeakAt | None:
        """The line of the peak, where it is known; its file is told from where the script lies."""
        operation = self.peak_operation
        if operation is None or operation.place is None:
            return None
        place, script = operation.place, getattr(sys.modules.get("__main__"), "__file__", None)
        file = relative(place.file, Path(script).resolve().parent) if script else place.file
        return PeakAt(file, place.line, place.function, operation.phase, operation.module)

    def _keep(self) -> None:
        self._at_peak = {name: size for name, size in self.modules.most_common() if size}
        self._rising = False
