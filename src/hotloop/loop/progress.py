"""What a person sees while a long run is under way: a bar in a terminal, a line per epoch elsewhere."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hotloop.records import Epoch
from hotloop.text import count, duration

REFRESH = 0.1  # seconds
MANY = 20  # lines of epochs, from which on they are shown only now and then


class Display:
    """The progress of a fit. `show=None` draws a bar in a terminal and prints lines elsewhere; False is silent."""

    def __init__(self, epochs: int, batches_per_epoch: int | None, show: bool | None, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._silent = show is False
        self._epochs = epochs
        self._bar: Progress | None = None
        if not self._silent and self._console.is_terminal:
            self._bar = _bar(self._console)
            total = epochs * batches_per_epoch if batches_per_epoch is not None else None
            self._task = self._bar.add_task("starting", total=total, loss="", rate="")
        self._done = 0
        self._last = self._last_line = 0.0
        self._lines = 0

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def begin_at(self, batches: int) -> None:
        """Batches that an earlier part of this run has done."""
        self._done = batches

    def tell(self, words: str) -> None:
        """Say what goes on beside the training."""
        if self._bar:
            self._bar.update(self._task, description=words)
            self._bar.refresh()

    def say(self, words: str) -> None:
        """A line that stays."""
        if not self._silent:
            self._console.print(words, highlight=False, markup=False, soft_wrap=True)

    def stretch(self, batches: int, epoch: int, loss: float | None, rate: float) -> None:
        """Batches that were trained on."""
        self._done += batches
        now = time.monotonic()
        if self._bar is None or now - self._last < REFRESH:
            return
        self._last = now
        self._bar.update(
            self._task,
            completed=self._done,
            description=f"epoch {epoch}/{self._epochs}",
            loss="" if loss is None else f"loss {loss:.4g}",
            rate=f"{count(rate)} items/s",
        )

    def epoch(self, done: Epoch) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self._done)
        now = time.monotonic()
        self._lines += 1
        if self._silent or (self._lines > MANY and now - self._last_line < REFRESH and done.number < self._epochs):
            return  # epochs of a few milliseconds would scroll past unread, and the printing would be most of the work
        self._last_line = now
        parts = [f"epoch {done.number}/{self._epochs}", f"loss {done.loss:.4g}"]
        if done.metrics:
            parts.append("validation " + ", ".join(f"{name} {value:.4g}" for name, value in done.metrics.items()))
        parts += [f"{count(done.items_per_second)} items/s", duration(done.seconds)]
        self.say("  ".join(parts))


@contextmanager
def telling(what: str, show: bool | None, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A line that says what is being tried just now and for how long; only a terminal shows it."""
    where = console or Console(stderr=True)
    if show is False or not where.is_terminal:
        yield lambda words: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=where, transient=True) as bar:
        task = bar.add_task(what)
        yield lambda words: bar.update(task, description=f"{what}: {words}")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        expand=True,
    )


class Stop:
    """Ctrl-C, once: finish the step that is running, then end. Twice: end at once. SIGTERM, where it is listened to."""

    def __init__(self) -> None:
        self.why: str | None = None  # what asked for the end
        self._at_once = False

    @property
    def asked(self) -> bool:
        return self.why is not None

    @contextmanager
    def listening(self, *, terminate: bool = False) -> Iterator[Self]:
        """Hear Ctrl-C; with `terminate` also SIGTERM, by which schedulers and machines say that the time is over."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may hear signals; elsewhere Ctrl-C is not ours
            return
        signals = [signal.SIGINT, signal.SIGTERM] if terminate else [signal.SIGINT]
        before: dict[signal.Signals, Any] = {each: signal.signal(each, self._hear) for each in signals}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, signal.SIG_DFL if handler is None else handler)  # None: not set by Python

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While nothing can be left half done, one Ctrl-C is enough."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        again, self.why = self.asked, "SIGTERM" if signum == signal.SIGTERM else "Ctrl-C"
        if again or self._at_once:
            raise KeyboardInterrupt
