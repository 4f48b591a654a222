"""What makes advice calm: means over a minute instead of moments, and conditions that must last."""

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from hotloop.monitor.reading import Reading

WINDOW = 60.0  # seconds over which means are taken
APART = 0.9  # seconds from a reading that is kept to the next
COVERED = 0.75  # share of the window that samples must span before a mean is given

Key = TypeVar("Key", bound=Hashable)


class Recent:
    """The last minute of readings, at most one a second."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> None:
        readings = self._readings
        if not readings or reading.time - readings[-1].time >= APART:
            readings.append(reading)
        while readings[0].time < reading.time - WINDOW:
            readings.popleft()

    def mean(self, gpu: int | None, field: str, seconds: float = WINDOW) -> float | None:
        """Mean of a number of a GPU, or of the host, over the last `seconds`; None where it is known for too few."""
        known = self._known(gpu, field, seconds)
        return None if known is None else sum(known) / len(known)

    def growth(self, gpu: int | None, field: str) -> float | None:
        """How much a number grew over the minute; None where it is known for too little of it."""
        known = self._known(gpu, field, WINDOW)
        return None if known is None else known[-1] - known[0]

    def _known(self, gpu: int | None, field: str, seconds: float) -> list[float] | None:
        begun = self._readings[-1].time - seconds
        pairs: list[tuple[float, float]] = []
        for reading in self._readings:
            for part in [reading.host] if gpu is None else [each for each in reading.gpus if each.index == gpu]:
                value = getattr(part, field)
                if value is not None and reading.time >= begun:
                    pairs.append((reading.time, value))
        if not pairs or pairs[-1][0] - pairs[0][0] < seconds * COVERED:
            return None
        return [value for _, value in pairs]


class Lasting(Generic[Key]):
    """Conditions by how long they have held: `needed` seconds until they are said, `lapse` seconds until they are over.

    >>> hot = Lasting(needed=10, lapse=3)
    >>> [hot.see(holding, now) for now, holding in [(0, ["a"]), (9, ["a"]), (10, ["a"]), (12, []), (13, [])]]
    [{}, {}, {'a': 10}, {'a': 10}, {}]
    """

    def __init__(self, needed: float, lapse: float = 0.0) -> None:
        self.needed = needed
        self.lapse = lapse
        self._spans: dict[Key, tuple[float, float]] = {}  # since when, and when last

    def see(self, holding: Iterable[Key], now: float) -> dict[Key, float]:
        """Note what holds now; gives what has lasted long enough, and for how many seconds it has held."""
        held = {key: (self._spans.get(key, (now, now))[0], now) for key in holding}
        resting = {key: span for key, span in self._spans.items() if now - span[1] < self.lapse}
        self._spans = resting | held
        return {key: last - since for key, (since, last) in self._spans.items() if last - since >= self.needed}

    def end(self, keys: Iterable[Key]) -> None:
        """Forget conditions at once."""
        for key in keys:
            self._spans.pop(key, None)

    def said(self, key: Key) -> bool:
        """Whether it has lasted long enough: then it takes more to end it than it took to begin it."""
        since, last = self._spans.get(key, (0.0, 0.0))
        return key in self._spans and last - since >= self.needed
