"""What `hotloop top` prints: a screen that is drawn again, text below text, or lines of JSON."""

import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live

from hotloop.apps.top.advice import Advice, Advisor
from hotloop.apps.top.view import screen
from hotloop.monitor.reading import Reading
from hotloop.records.files import finite

SOON = 0.5  # seconds between the look that begins the rates and the first sample

Samples = Iterator[tuple[Reading, Sequence[Advice]]]


def samples(read: Callable[[], Reading], every: float, *, once: bool) -> Samples:
    """Readings at even distances with their advice, without end or one; the first one knows its rates already."""
    read()
    time.sleep(min(SOON, every))
    advisor, due = Advisor(), time.monotonic()
    while True:
        reading = read()
        yield reading, advisor.see(reading)
        if once:
            return
        due = max(due + every, time.monotonic())  # what was missed is not made up for
        time.sleep(max(0.0, due - time.monotonic()))


def show(taken: Samples, *, once: bool) -> None:
    """Draw them again and again in a terminal; below one another in a pipe, or where one sample is all."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 is shown what it has
    console, me = Console(highlight=False), _me()
    if once or not sys.stdout.isatty() or console.is_dumb_terminal:
        for number, (reading, advice) in enumerate(taken):
            if number:
                console.print()
            console.print(screen(reading, advice, me))
            sys.stdout.flush()
        return
    signal.signal(signal.SIGTERM, _end)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for reading, advice in taken:
            live.update(screen(reading, advice, me), refresh=True)


def _me() -> str | None:
    """The user, as processes are told by."""
    try:
        return psutil.Process().username()
    except (psutil.Error, OSError, KeyError):  # as in a container whose user has no name
        return None


def _end(number: int, frame: FrameType | None) -> None:
    """After SIGTERM, the terminal is restored on the way out."""
    sys.exit(128 + number)


def write_lines(taken: Samples) -> None:
    """A line of JSON for each, as programs read it from a pipe."""
    for reading, advice in taken:
        line = json.dumps(as_data(reading, advice), allow_nan=False, separators=(",", ":"))
        print(line, flush=True)


def as_data(reading: Reading, advice: Sequence[Advice]) -> dict[str, Any]:
    """A reading and its advice as JSON can hold them."""
    data: dict[str, Any] = finite({**reading.to_json(), "advice": [each.to_json() for each in advice]})
    return data
