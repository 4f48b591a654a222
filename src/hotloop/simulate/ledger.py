"""Whose the allocated bytes are, now and at the peak, and how they went over time."""

from collections import Counter

from hotloop.simulate.events import Place

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
POINTS = 512  # of a timeline, at least; at most twice as many


class Timeline:
    """Points (event, allocated, reserved), thinned as they come: of neighbours the highest is kept."""

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._kept: list[tuple[int, int, int]] = []
        self._stride = 1
        self._events = 0
        self._highest: tuple[int, int, int] | None = None

    def add(self, allocated: int, reserved: int) -> None:
        self._events += 1
        if self._highest is None or allocated > self._highest[1]:
            self._highest = (self._events, allocated, reserved)
        if self._events % self._stride == 0:
            self._kept.append(self._highest)
            self._highest = None
            if len(self._kept) >= 2 * self._points:
                pairs = zip(self._kept[::2], self._kept[1::2], strict=True)
                self._kept = [max(pair, key=lambda point: point[1]) for pair in pairs]
                self._stride *= 2

    def points(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(self._kept) if self._highest is None else (*self._kept, self._highest)


class Ledger:
    """Bytes by category and by module. How they were at the peak is noted when it is left, not at each step up."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.modules: Counter[str] = Counter()  # of activations alone
        self.peak = 0
        self.peak_place: Place | None = None
        self.peak_module = ""
        self._at_peak: tuple[dict[str, int], dict[str, int]] = ({}, {})
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

    def saw(self, allocated: int, place: Place | None, module: str) -> None:
        """So much is allocated now."""
        if allocated > self.peak:
            self.peak, self.peak_place, self.peak_module = allocated, place, module
            self._rising = True

    def at_peak(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by category, and those of activations by module, the largest first."""
        if self._rising:
            self._keep()
        return self._at_peak

    def _keep(self) -> None:
        kinds = {CATEGORIES.get(kind, kind): size for kind, size in self.now.items() if size}
        modules = {name: size for name, size in self.modules.most_common() if size}
        self._at_peak = kinds, modules
        self._rising = False
