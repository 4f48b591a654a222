"""The progress of a run: a bar in a terminal or a notebook, lines elsewhere."""

import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from hotloop.printing import markup
from hotloop.printing.terminal import (
    BarColumn,
    Console,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from hotloop.printing.text import count, duration, wrap
from hotloop.records import Epoch, epochs_table

REFRESH = 0.1  # seconds
REDRAW = 0.5  # seconds between two drawings of a notebook's cell
EVERY = 30.0  # seconds between two lines of an epoch where there is no bar
LONG_RUN = 10.0  # seconds; what is left of a run is told from there on
MARKS, BETWEEN_MARKS = 60, 5.0  # by which the time left is reckoned, and the seconds between two of them
MANY = 20  # lines of epochs, from which on they are shown only now and then


class Display:
    """The progress of a fit. `show=None` draws a bar in a terminal or a notebook, prints lines elsewhere; False is
    silent.

    `done` are the batches of earlier parts of the run: the bar begins there, and the time left is estimated without
    them.
    """

    def __init__(
        self,
        epochs: int,
        batches_per_epoch: int | None,
        show: bool | None,
        console: Console | None = None,
        *,
        done: int = 0,
    ) -> None:
        self._console = _where(console)
        self._silent = show is False
        self._epochs = epochs
        self._length = batches_per_epoch
        self._total = epochs * batches_per_epoch if batches_per_epoch is not None else None
        self._bar: Progress | None = None
        self._cell: _Cell | None = None
        if not self._silent and self._console.is_jupyter:
            self._cell = _Cell()
        elif not self._silent and self._console.is_terminal:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task("starting", total=self._total, completed=done, loss="", rate="")
        self._done = done
        self._pace = _Pace()
        self._last = self._last_line = 0.0
        self._lines = 0

    def __enter__(self) -> Self:
        self._last_line = time.monotonic()
        if self._bar:
            self._bar.start()
        if self._cell:
            self._cell.show("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        if self._cell:
            self._cell.close(None if kind is None else f"ended by {kind.__name__} after batch {self._batches()}")

    def say(self, words: str) -> None:
        """Print a line that stays, wrapped to the width of a terminal."""
        if self._silent:
            return
        if self._cell:
            self._cell.say(words)
            return
        width = self._console.width if self._console.is_terminal else sys.maxsize
        for line in wrap(words, width, hanging="  "):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stretch(self, batches: int, epoch: int, loss: float | None, rate: float) -> None:
        """Advance the bar by batches."""
        self._done += batches
        now = time.monotonic()
        if self._silent or now - self._last < REFRESH:
            return
        self._last = now
        self._pace.mark(now, self._done)
        place, speed = f"epoch {epoch}/{self._epochs}", f"{count(rate)} items/s"
        value = "" if loss is None else f"loss {loss:.4g}"
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=place, loss=value, rate=speed)
        elif self._cell:
            if self._cell.is_due(now):
                spent = f"{_clock(now - self._cell.begun)} elapsed"
                parts = [place, f"batch {self._batches()}", value, speed, spent, self._left(now)]
                self._cell.show(" · ".join(filter(None, parts)), self._share())
        elif now - self._last_line >= EVERY:
            self._last_line = now
            parts = [place, self._batch(), value, speed, self._left(now)]
            self.say("  ".join(filter(None, parts)))

    def epoch(self, done: Epoch) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self._done)
        now = time.monotonic()
        if self._cell:
            self._cell.epoch(done, self._epochs, self._share())
            return
        self._lines += 1
        if self._silent or (self._lines > MANY and now - self._last_line < REFRESH and done.number < self._epochs):
            return  # epochs of a few milliseconds would scroll past unread, and the printing would be most of the work
        self._last_line = now
        parts = [f"epoch {done.number}/{self._epochs}", f"loss {done.loss:.4g}"]
        for kind, metrics in (("training", done.train_metrics), ("validation", done.metrics)):
            if metrics:
                parts.append(f"{kind} " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        parts += [f"{count(done.items_per_second)} items/s", duration(done.seconds)]
        if self._bar is None and (left := self._left(now, least=LONG_RUN)):
            parts.append(left)
        whole = (part.replace(" ", "\xa0").replace(",\xa0", ", ") for part in parts)  # a figure keeps its name and unit
        self.say("  ".join(whole))

    def _share(self) -> float | None:
        return self._done / self._total if self._total else None

    def _batches(self) -> str:
        """Finished batches of the run."""
        return f"{self._done:,}" if self._total is None else f"{self._done:,}/{self._total:,}"

    def _batch(self) -> str:
        """The batch in the epoch, or in the run where the length of an epoch is unknown."""
        if not self._length:
            return f"batch {self._done:,}"
        return f"batch {(self._done - 1) % self._length + 1:,}/{self._length:,}"

    def _left(self, now: float, least: float = 0.0) -> str:
        """The time left in words; empty where unknown or shorter than `least`."""
        seconds = None if self._total is None else self._pace.seconds_for(self._total - self._done, now, self._done)
        return "" if seconds is None or seconds <= least else f"{_clock(seconds)} left"


def _where(console: Console | None) -> Console:
    """Where progress is shown. A front end that cannot update an output of a notebook gets lines, as a log does.

    IPython is enough: no widgets, which some front ends lack.
    """
    where = console or Console(stderr=True)
    if where.is_jupyter and not hasattr(import_module("IPython.display"), "update_display"):
        return Console(stderr=True, force_jupyter=False)
    return where


class _Pace:
    """The rate of batches in the last minutes, without the warm-up of a run."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=MARKS)

    def mark(self, now: float, done: int) -> None:
        if not self._marks or now - self._marks[-1][0] >= BETWEEN_MARKS:
            self._marks.append((now, done))

    def seconds_for(self, batches: int, now: float, done: int) -> float | None:
        """Expected seconds of so many more batches and what is between them; None before that is known."""
        if not self._marks or done <= self._marks[0][1] or batches <= 0:
            return None
        began, before = self._marks[0]
        return batches * (now - began) / (done - before)


class _Cell:
    """One output of a notebook's cell, updated in place by the training thread."""

    def __init__(self) -> None:
        self.status: str | None = None
        self.share: float | None = None
        self.begun = time.monotonic()
        self._name = f"hotloop-{secrets.token_hex(8)}"
        self._shown = False
        self._last = 0.0
        self._said: list[list[str]] = [[], []]  # before the first epoch, and since then
        self._epochs: list[Epoch] = []
        self._table = (0, "")  # of so many epochs: it is made once for each

    def is_due(self, now: float) -> bool:
        return now - self._last >= REDRAW

    def say(self, words: str) -> None:
        lines = self._said[bool(self._epochs)]
        lines.append(words)
        del lines[:-MANY]
        self.draw()

    def show(self, status: str, share: float | None = None) -> None:
        """Show what is done now, and the share of the run that is done."""
        self.status, self.share = status, share
        self.draw()

    def epoch(self, done: Epoch, epochs: int, share: float | None) -> None:
        self._epochs.append(done)
        self.status, self.share = f"epoch {done.number}/{epochs}", share
        if self.is_due(time.monotonic()):
            self.draw()

    def close(self, words: str | None = None) -> None:
        """Remove the bar; messages stay, and of a run that ended early its last position."""
        self.status, self.share = None, None
        if words is not None:
            self._said[bool(self._epochs)].insert(0, words)
        self.draw()

    def draw(self) -> None:
        self._last = time.monotonic()
        content = {"text/html": self._html(), "text/plain": self._text()}
        display = import_module("IPython.display")  # which every notebook has
        draw = display.update_display if self._shown else display.display
        draw(content, raw=True, display_id=self._name)
        self._shown = True

    def _html(self) -> str:
        before, since = self._said
        if self._table[0] != len(self._epochs):
            self._table = (len(self._epochs), self._rows())
        parts = [*map(markup.line, before), self._table[1], *map(markup.line, since)]
        if self.status is not None:
            parts += [markup.bar(self.share), markup.line(self.status, faint=True)]
        return markup.box(*parts)

    def _rows(self) -> str:
        """The last epochs as a table."""
        hidden = len(self._epochs) - MANY
        above = markup.line(f"{hidden:,} epochs before these are in the report", faint=True) if hidden > 0 else ""
        return above + epochs_table(self._epochs[-MANY:])

    def _text(self) -> str:
        """The same as text, for front ends without HTML."""
        rows = ["  ".join([f"epoch {each.number}", f"loss {each.loss:.4g}"]) for each in self._epochs[-MANY:]]
        return "\n".join([*self._said[0], *rows, *self._said[1], *filter(None, [self.status])])


def _clock(seconds: float) -> str:
    """A duration as h:mm:ss.

    >>> _clock(75.4), _clock(7300)
    ('0:01:15', '2:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextmanager
def telling(what: str, show: bool | None, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A line on the present trial and its time, in a terminal or notebook only."""
    where = _where(console)
    if show is False or not (where.is_terminal or where.is_jupyter):
        yield lambda words: None
        return
    if where.is_jupyter:
        with _telling_in_a_cell(what) as tell:
            yield tell
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=where, transient=True) as bar:
        task = bar.add_task(what)
        yield lambda words: bar.update(task, description=f"{what}: {words}")


@contextmanager
def _telling_in_a_cell(what: str) -> Iterator[Callable[[str], None]]:
    cell = _Cell()

    def tell(words: str) -> None:
        now = time.monotonic()
        if cell.is_due(now):
            cell.show(f"{what}: {words} · {_clock(now - cell.begun)}")

    cell.show(what)
    try:
        yield tell
    finally:
        cell.close()


class _Narrow(Progress):
    """A bar that leaves two columns free, for "^C": wrapped to the next line, it would keep the bar on the screen."""

    def make_tasks_table(self, tasks: Any) -> Any:
        table = super().make_tasks_table(tasks)
        if tasks:  # none while `Progress` is made, which has no console yet
            table.width = max(self.console.width - 2, 1)
        return table


def _bar(console: Console) -> Progress:
    return _Narrow(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("·"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        transient=True,
        expand=True,
    )
