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
    """How far a fit has come; this one shows it to nobody."""

    def __init__(self, epochs: int, batches_per_epoch: int | None, done: int = 0) -> None:
        self._epochs, self._length, self._done = epochs, batches_per_epoch, done
        self._total = None if batches_per_epoch is None else epochs * batches_per_epoch
        self._pace = _Pace()
        self._last = 0.0

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if kind is None else f"ended by {kind.__name__} after batch {self._batches()}")

    def open(self) -> None:
        """Begin to show the run."""

    def close(self, ended: str | None = None) -> None:
        """Show no more; `ended` says where an error has ended the run."""

    def say(self, words: str) -> None:
        """Print a line that stays."""

    def stretch(self, batches: int, epoch: int, loss: float | None, rate: float) -> None:
        """Advance by batches."""
        self._done += batches
        now = time.monotonic()
        if now - self._last >= REFRESH:
            self._last = now
            self._pace.mark(now, self._done)
            value = "" if loss is None else f"loss {loss:.4g}"
            self._advanced(now, f"epoch {epoch}/{self._epochs}", value, f"{count(rate)} items/s")

    def _advanced(self, now: float, place: str, loss: str, speed: str) -> None:
        """Show where the run is."""

    def epoch(self, done: Epoch) -> None:
        """Show an epoch that is done."""

    def _batches(self) -> str:
        """Finished batches of the run."""
        return f"{self._done:,}" if self._total is None else f"{self._done:,}/{self._total:,}"

    def _left(self, now: float, least: float = 0.0) -> str:
        """The time left in words; empty where unknown or shorter than `least`."""
        seconds = None if self._total is None else self._pace.seconds_for(self._total - self._done, now, self._done)
        return "" if seconds is None or seconds <= least else f"{_clock(seconds)} left"


class _Lines(Display):
    """A line for each epoch, and now and then one of a long epoch."""

    def __init__(self, console: Console, epochs: int, batches_per_epoch: int | None, done: int) -> None:
        super().__init__(epochs, batches_per_epoch, done)
        self._console = console
        self._last_line = 0.0
        self._lines = 0

    def open(self) -> None:
        self._last_line = time.monotonic()

    def say(self, words: str) -> None:
        """Print a line that stays, wrapped to the width of a terminal."""
        width = self._console.width if self._console.is_terminal else sys.maxsize
        for line in wrap(words, width, hanging="  "):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _advanced(self, now: float, place: str, loss: str, speed: str) -> None:
        if now - self._last_line >= EVERY:
            self._last_line = now
            batch = f"batch {self._done:,}"  # of the run, where the length of an epoch is unknown
            if self._length:
                batch = f"batch {(self._done - 1) % self._length + 1:,}/{self._length:,}"
            self.say("  ".join(filter(None, [place, batch, loss, speed, self._left(now)])))

    def epoch(self, done: Epoch) -> None:
        now = time.monotonic()
        self._lines += 1
        if self._lines > MANY and now - self._last_line < REFRESH and done.number < self._epochs:
            return  # epochs of a few milliseconds would scroll past unread, and the printing would be most of the work
        self._last_line = now
        parts = [f"epoch {done.number}/{self._epochs}", f"loss {done.loss:.4g}"]
        for kind, metrics in (("training", done.train_metrics), ("validation", done.metrics)):
            if metrics:
                parts.append(f"{kind} " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        parts += [f"{count(done.items_per_second)} items/s", duration(done.seconds), self._left(now, least=LONG_RUN)]
        # A figure keeps its name and unit.
        whole = (part.replace(" ", "\xa0").replace(",\xa0", ", ") for part in parts if part)
        self.say("  ".join(whole))


class _Bar(_Lines):
    """A bar in a terminal, above it a line for each epoch."""

    def __init__(self, console: Console, epochs: int, batches_per_epoch: int | None, done: int) -> None:
        super().__init__(console, epochs, batches_per_epoch, done)
        self._bar = _bar(console)
        self._task = self._bar.add_task("starting", total=self._total, completed=done, loss="", rate="")

    def open(self) -> None:
        super().open()
        self._bar.start()

    def close(self, ended: str | None = None) -> None:
        self._bar.stop()

    def _advanced(self, now: float, place: str, loss: str, speed: str) -> None:
        self._bar.update(self._task, completed=self._done, description=place, loss=loss, rate=speed)

    def epoch(self, done: Epoch) -> None:
        self._bar.update(self._task, completed=self._done)
        super().epoch(done)

    def _left(self, now: float, least: float = 0.0) -> str:
        return ""  # the bar has it


class _Cell(Display):
    """One output of a notebook's cell, updated in place by the training thread."""

    def __init__(self, epochs: int = 1, batches_per_epoch: int | None = None, done: int = 0) -> None:
        super().__init__(epochs, batches_per_epoch, done)
        self.begun = time.monotonic()
        self._status: str | None = None
        self._name = f"hotloop-{secrets.token_hex(8)}"
        self._shown = False
        self._last_drawn = 0.0
        self._said: list[list[str]] = [[], []]  # before the first epoch, and since then
        self._known: list[Epoch] = []

    def open(self) -> None:
        self.show("starting")

    def close(self, ended: str | None = None) -> None:
        """Remove the bar; messages stay, and of a run that ended early its last position."""
        self._status = None
        if ended is not None:
            self._said[bool(self._known)].insert(0, ended)
        self._draw()

    def say(self, words: str) -> None:
        lines = self._said[bool(self._known)]
        lines.append(words)
        del lines[:-MANY]
        self._draw()

    def is_due(self, now: float) -> bool:
        return now - self._last_drawn >= REDRAW

    def show(self, status: str) -> None:
        """Show what is done now."""
        self._status = status
        self._draw()

    def _advanced(self, now: float, place: str, loss: str, speed: str) -> None:
        if self.is_due(now):
            spent = f"{_clock(now - self.begun)} elapsed"
            parts = [place, f"batch {self._batches()}", loss, speed, spent, self._left(now)]
            self.show(" · ".join(filter(None, parts)))

    def epoch(self, done: Epoch) -> None:
        self._known.append(done)
        self._status = f"epoch {done.number}/{self._epochs}"
        if self.is_due(time.monotonic()):
            self._draw()

    def _draw(self) -> None:
        self._last_drawn = time.monotonic()
        content = {"text/html": self._html(), "text/plain": self._text()}
        display = import_module("IPython.display")  # which every notebook has
        draw = display.update_display if self._shown else display.display
        draw(content, raw=True, display_id=self._name)
        self._shown = True

    def _html(self) -> str:
        before, since = self._said
        parts = list(map(markup.line, before))
        if (hidden := len(self._known) - MANY) > 0:
            parts.append(markup.line(f"{hidden:,} epochs before these are in the report", faint=True))
        parts += [epochs_table(self._known[-MANY:]), *map(markup.line, since)]
        if self._status is not None:
            share = self._done / self._total if self._total else None
            parts += [markup.bar(share), markup.line(self._status, faint=True)]
        return markup.box(*parts)

    def _text(self) -> str:
        """The same as text, for front ends without HTML."""
        rows = ["  ".join([f"epoch {each.number}", f"loss {each.loss:.4g}"]) for each in self._known[-MANY:]]
        return "\n".join([*self._said[0], *rows, *self._said[1], *filter(None, [self._status])])


def display_of(
    epochs: int, batches_per_epoch: int | None, show: bool | None, console: Console | None = None, *, done: int = 0
) -> Display:
    """The display of a fit. `show=None`: a bar in a terminal or a notebook, lines elsewhere; False is silent.

    `done` are the batches of earlier parts of the run: the bar begins there, and the time left is estimated without
    them.
    """
    where = _where(console)
    if show is False:
        return Display(epochs, batches_per_epoch, done)
    if where.is_jupyter:
        return _Cell(epochs, batches_per_epoch, done)
    return (_Bar if where.is_terminal else _Lines)(where, epochs, batches_per_epoch, done)


def _where(console: Console | None) -> Console:
    """Where progress is shown. A front end that cannot update an output of a notebook gets lines, as a log does.

    IPython is enough: no widgets, which some front ends lack.
    """
    where = console or Console(stderr=True)
    if where.is_jupyter and not hasattr(import_module("IPython.display"), "update_display"):
        return Console(stderr=True, force_jupyter=False)
    return where


@contextmanager
def telling(what: str, show: bool | None, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A line on the present trial and its time, in a terminal or notebook only."""
    where = _where(console)
    if show is not False and where.is_jupyter:
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
    elif show is not False and where.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=where, transient=True) as bar:
            task = bar.add_task(what)
            yield lambda words: bar.update(task, description=f"{what}: {words}")
    else:
        yield lambda words: None


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


def _clock(seconds: float) -> str:
    """A duration as h:mm:ss.

    >>> _clock(75.4), _clock(7300)
    ('0:01:15', '2:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


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
