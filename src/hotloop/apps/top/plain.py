"""`hotloop top` where nobody looks at a screen: plain text or JSON, sample by sample."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TextIO

from rich.console import Console

from hotloop.apps.top.advice import Advice
from hotloop.apps.top.cells import in_encoding
from hotloop.apps.top.history import History
from hotloop.apps.top.view import screen
from hotloop.apps.top.view_options import ViewOptions
from hotloop.files.whole import finite
from hotloop.monitor.reading import Reading

WIDTH = 100  # of text that goes to a file or a pipe, where COLUMNS says nothing else
SOON = 0.5  # seconds between the look that begins the rates and the first sample


def is_plain(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether text must do without any escape sequence: a pipe, a file, a dumb terminal, or NO_COLOR.

    >>> import io
    >>> is_plain(io.StringIO(), {})
    True
    """
    dumb = environ.get("TERM", "").lower() in ("dumb", "unknown")
    return dumb or bool(environ.get("NO_COLOR")) or not stream.isatty()


def samples(
    read: Callable[[], Reading],
    *,
    every: float = 1.0,
    count: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Reading]:
    """Readings at even distances, without end or so many; the first one knows its rates already."""
    read()
    sleep(min(SOON, every))
    due = clock()
    while count is None or count > 0:
        yield read()
        count = None if count is None else count - 1
        if count != 0:
            due = max(due + every, clock())  # what was missed is not made up for
            sleep(max(0.0, due - clock()))


class Texts:
    """Writes readings one below the other, all processes included; without any escape sequence unless `styled`."""

    def __init__(
        self, out: TextIO, options: ViewOptions, every: float = 1.0, *, width: int | None = None, styled: bool = False
    ) -> None:
        self._out = out
        self._options = replace(options, keys=False)
        self._history = History(max(60.0, 20 * every), every)
        self._width = width or _width(out)
        # Without styles rich writes no escape sequence, whatever the environment says of colours.
        system: Literal["auto"] | None = "auto" if styled else None
        self._console = Console(
            file=out, width=self._width, color_system=system, force_terminal=styled, highlight=False, soft_wrap=True
        )
        self._begun = False

    def show(self, reading: Reading, advice: Sequence[Advice]) -> None:
        """Write one, after a blank line where one came before; whoever reads along has it at once."""
        self._history.add(reading)
        lines = screen(reading, self._history, advice, width=self._width, height=None, options=self._options)
        with self._console:  # one write: who reads along gets a sample whole
            if self._begun:
                self._console.print()
            for line in in_encoding(lines, getattr(self._out, "encoding", None) or "utf-8"):
                line.rstrip()
                self._console.print(line)
        self._begun = True
        self._out.flush()


def _width(out: TextIO) -> int:
    """Of the terminal; of what is none, what COLUMNS says."""
    try:
        columns = os.get_terminal_size(out.fileno()).columns
    except (OSError, ValueError, AttributeError):
        told = os.environ.get("COLUMNS", "")
        columns = int(told) if told.isdecimal() else WIDTH
    return max(columns or 80, 20)


def as_data(reading: Reading, advice: Sequence[Advice]) -> dict[str, Any]:
    """A reading and its advice as JSON can hold them."""
    data: dict[str, Any] = finite({**reading.to_json(), "advice": [each.to_json() for each in advice]})
    return data


def as_line(reading: Reading, advice: Sequence[Advice]) -> str:
    """The same on one line, as programs read it from a pipe."""
    return json.dumps(as_data(reading, advice), allow_nan=False, separators=(",", ":")) + "\n"
