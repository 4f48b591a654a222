"""What a person sees while a long run is under way: a bar in a terminal, a line per epoch elsewhere."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from hotloop._torch import OF_WORKERS, waits_for_workers
from hotloop.records import Epoch
from hotloop.terminal import (
    BarColumn,
    Console,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from hotloop.text import count, duration, wrap

REFRESH = 0.1  # seconds
PATIENCE = 1.0  # seconds between the death of a worker and the signal that it died of
FAILURES = (RuntimeError, OSError, EOFError)  # of a loader, where a worker dies, or dies while it hands over a tensor
MANY = 20  # lines of epochs, from which on they are shown only now and then


class Display:
    """The progress of a fit. `show=None` draws a bar in a terminal and prints lines elsewhere; False is silent.

    `done` are batches that an earlier part of the run has done: the bar begins there, and the time left is reckoned
    without them.
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
        self._console = console or Console(stderr=True)
        self._silent = show is False
        self._epochs = epochs
        self._bar: Progress | None = None
        if not self._silent and self._console.is_terminal:
            self._bar = _bar(self._console)
            total = epochs * batches_per_epoch if batches_per_epoch is not None else None
            self._task = self._bar.add_task("starting", total=total, completed=done, loss="", rate="")
        self._done = done
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

    def tell(self, words: str) -> None:
        """Say what goes on beside the training."""
        if self._bar:
            self._bar.update(self._task, description=words)
            self._bar.refresh()

    def say(self, words: str) -> None:
        """A line that stays, and that a terminal gets in lines of its width."""
        if self._silent:
            return
        width = self._console.width if self._console.is_terminal else sys.maxsize
        for line in wrap(words, width, hanging="  "):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

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
        whole = (part.replace(" ", "\xa0").replace(",\xa0", ", ") for part in parts)  # a figure keeps its name and unit
        self.say("  ".join(whole))


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
        self.why: str | None = None  # what asked for the end first
        self._pressed = False  # Ctrl-C
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}  # handlers to put back

    @property
    def asked(self) -> bool:
        return self.why is not None

    @contextmanager
    def listening(self, *, terminate: bool = False) -> Iterator[Self]:
        """Hear Ctrl-C; with `terminate` also SIGTERM, by which schedulers and machines say that the time is over."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may hear signals; elsewhere Ctrl-C is not ours
            return
        for each in [signal.SIGINT, signal.SIGTERM] if terminate else [signal.SIGINT]:
            if signal.getsignal(each) is not signal.SIG_IGN:  # a shell starts jobs in the background like that
                self._before[each] = signal.signal(each, self._hear)
        try:
            yield self
        finally:
            while self._before:
                each, handler = self._before.popitem()
                signal.signal(each, signal.SIG_DFL if handler is None else handler)  # None: not set by Python

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While nothing can be left half done, one Ctrl-C is enough."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def comes(self) -> bool:
        """Whether the end is asked for now or in a moment: a loader's workers may die of a signal before it is here."""
        until = time.monotonic() + PATIENCE
        while not self.asked and self._before and time.monotonic() < until:
            time.sleep(0.01)
        return self.asked

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        pressed = signum == signal.SIGINT
        again, self._pressed = pressed and self._pressed, pressed or self._pressed
        self.why = self.why or ("Ctrl-C" if pressed else "SIGTERM")
        self.shield()
        if again or self._at_once:  # SIGTERM again is impatience, and the save is what it is impatient for
            self._at_once = False
            raise KeyboardInterrupt

    def shield(self) -> None:
        """A signal may reach a loader's workers too, whose death PyTorch raises anywhere, even in a step or a save.

        It is let through only where a batch is waited for, which nobody will bring, and where nothing is half done.
        PyTorch begins to listen with the first workers, so this is of use once they are there.
        """
        if sys.platform == "win32" or signal.SIGCHLD in self._before or signal.SIGTERM not in self._before:
            return
        raises = signal.getsignal(signal.SIGCHLD)
        if callable(raises):
            self._before[signal.SIGCHLD] = raises
            signal.signal(signal.SIGCHLD, lambda n, frame: raises(n, frame) if waits_for_workers(frame) else None)


def is_of_a_loader(error: BaseException) -> bool:
    """Whether a DataLoader complains, of workers that a signal has killed, which it does between two steps."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    complains = any(frame.f_globals.get("__name__") in OF_WORKERS for frame in frames)
    return complains and isinstance(error, FAILURES)
