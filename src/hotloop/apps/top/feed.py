"""Readings from one worker thread for any number of listeners, each of whom gets the latest: nobody has a queue."""

import asyncio
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hotloop.apps.top.advice import Advice, Advisor
from hotloop.monitor.reading import Reading
from hotloop.printing.text import printable
from hotloop.records import Record
from hotloop.records.files import finite

HOUR = 3600.0
FINEST = 2.0  # seconds between two points of the history: 1,800 of them are an hour, more than a plot has pixels
SLACK = 0.9  # a sample that comes this share of the distance after the one before is a new point: timers are not exact
LONGEST_SHOWN = 500  # characters of a string that is shown; a command line can have a hundred thousand
OF_GPU = ("utilisation", "memory_used", "power", "temperature")
OF_HOST = ("cpu", "memory_used")


@dataclass(frozen=True)
class HardwareSample(Record):
    """What is known after one attempt to read the hardware."""

    number: int  # from 1
    reading: Reading | None = None  # the last that succeeded
    advice: tuple[Advice, ...] = ()
    trouble: str | None = None  # why the latest attempt failed

    @cached_property
    def encoded(self) -> str:
        """For the page: one line of JSON, made once for all listeners."""
        return json.dumps(shown(self.to_json()), separators=(",", ":"), allow_nan=False)


class Feed:
    """Reads the hardware every so often, remembers the last hour, and wakes whoever waits for a sample.

    Everything but the reading itself happens in the thread of the event loop. A listener asks for the sample `after`
    the one it has; one that was slow gets the latest, and what it missed was never kept for it.
    """

    def __init__(self, read: Callable[[], Reading], *, every: float = 1.0, advisor: Advisor | None = None) -> None:
        self.every = every
        self.latest: HardwareSample | None = None
        self.closed = False
        self._read = read
        self._advisor = advisor or Advisor()
        self._width = max(every, FINEST)
        self._points: deque[tuple[float, dict[str, float | None]]] = deque()
        self._fresh = asyncio.Event()
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to read, in a thread of its own. Called inside the event loop."""
        # A daemon: a driver that hangs in a call must not keep the program from ending.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, args=(loop,), name="hotloop top", daemon=True).start()

    def close(self) -> None:
        """Read no more, and send all listeners home."""
        self.closed = True
        self._stop.set()
        self._fresh.set()

    def take(self, reading: Reading | None, advice: tuple[Advice, ...] = (), trouble: str | None = None) -> None:
        """Make a sample the latest. Without a reading, the last one stays, beside the trouble."""
        before = self.latest
        if reading is not None:
            self._remember(reading)
        elif before is not None:
            reading, advice = before.reading, before.advice
        self.latest = HardwareSample(1 if before is None else before.number + 1, reading, advice, trouble)
        self._fresh.set()
        self._fresh = asyncio.Event()

    async def after(self, number: int, patience: float) -> HardwareSample | None:
        """The latest sample, once there is one past `number`; None where there was none within `patience` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while not self.closed and (self.latest is None or self.latest.number <= number):
                    await self._fresh.wait()
        return self.latest if self.latest is not None and self.latest.number > number else None

    def _remember(self, reading: Reading) -> None:
        points = self._points
        if points and reading.time < points[-1][0]:
            points.clear()  # the clock was set back
        if not points or reading.time - points[-1][0] >= self._width * SLACK:
            numbers = {f"host.{field}": getattr(reading.host, field) for field in OF_HOST}
            for gpu in reading.gpus:
                numbers |= {f"gpu{gpu.index}.{field}": getattr(gpu, field) for field in OF_GPU}
            points.append((reading.time, numbers))
        while points[0][0] < reading.time - HOUR:
            points.popleft()

    def hour(self) -> dict[str, Any]:
        """The last hour as lists of equal length, one for each number that is plotted."""
        names = self._points[-1][1] if self._points else ()
        return {
            "width": self._width,
            "times": [_short(when) for when, _ in self._points],
            "values": {name: [_short(numbers.get(name)) for _, numbers in self._points] for name in names},
        }

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            taken: tuple[Reading | None, tuple[Advice, ...], str | None]
            try:
                reading = self._read()
                taken = (reading, self._advisor.see(reading), None)
            except Exception as error:  # noqa: BLE001  # whatever a driver raises is shown, and the next attempt may work
                taken = (None, (), f"{type(error).__name__}: {error}")
            with suppress(RuntimeError):  # the event loop was closed while this thread read
                loop.call_soon_threadsafe(self.take, *taken)
            due = max(due + self.every, time.monotonic())  # after a slow reading there is nothing to catch up with


def shown(value: Any) -> Any:
    """The same data for people's eyes: strings from outside made printable and cut, numbers that are none as None.

    >>> shown({"name": "a" + chr(27) + "[2J", "power": float("nan")})
    {'name': 'a\\\\x1b[2J', 'power': None}
    """
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if isinstance(value, str):
        clean = printable(value[: LONGEST_SHOWN + 1])
        return clean if len(clean) <= LONGEST_SHOWN else clean[: LONGEST_SHOWN - 1] + "…"
    return finite(value)


def _short(value: float | None) -> float | None:
    """With no digits that a plot cannot show."""
    return None if value is None or not math.isfinite(value) else round(value, 1)
