"""`Stop`: what asks a run to end; which errors are that end, and the words that tell of it."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from hotloop._torch import OF_WORKERS, waits_for_workers
from hotloop.printing.text import printable

SIGNAL_PATIENCE = 1.0  # seconds between the death of a worker and the signal that it died of
FAILURES = (RuntimeError, OSError, EOFError)  # of a loader, where a worker dies, or dies while it hands over a tensor
ENDINGS = ("Ctrl-C", "SIGTERM", "the time limit", "another rank")  # of a run that is meant to go on


class Stop:
    """Ctrl-C once: finish the running step, then end; twice: end at once. SIGTERM, where it is handled."""

    def __init__(self) -> None:
        self.why: str | None = None  # what asked for the end first
        self.asked = False
        self.is_final = False  # nothing is left to do, whatever number of epochs is left
        self.twice = False  # Ctrl-C, so that whoever trains was interrupted
        self._pressed = False  # the same, once
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}  # handlers to restore

    def ask(self, why: str, *, is_final: bool = False) -> None:
        """Ask for the end of the run, unless something has before."""
        if not self.asked:
            self.why, self.asked, self.is_final = why, True, is_final

    @contextmanager
    def listening(self, *, terminate: bool = False) -> Iterator[Self]:
        """Handle Ctrl-C; with `terminate` also SIGTERM, which schedulers send at the end of a job."""
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
        """Inside the block, where nothing can be left half done, one Ctrl-C ends at once."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def comes(self) -> bool:
        """Whether a stop is asked for now or in a moment: a signal may kill workers before it arrives here."""
        until = time.monotonic() + SIGNAL_PATIENCE
        while not self.asked and self._before and time.monotonic() < until:
            time.sleep(0.01)
        return self.asked

    def explains(self, error: BaseException) -> bool:
        """Whether an error is the end that was asked for: a second Ctrl-C, or workers that its signal has killed."""
        return self.asked or (is_of_a_loader(error) and self.comes())

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        pressed = signum == signal.SIGINT
        again, self._pressed = pressed and self._pressed, pressed or self._pressed
        self.ask("Ctrl-C" if pressed else "SIGTERM")
        self.shield()
        if again or self._at_once:  # SIGTERM again is impatience, and the save is what it is impatient for
            self._at_once, self.twice = False, self.twice or again
            raise KeyboardInterrupt

    def shield(self) -> None:
        """Hold back PyTorch's error for workers that a signal killed, which may come even in a step or a save.

        The error passes only while a batch is waited for, where nothing is half done. PyTorch installs its handler
        with the first workers, so call this after they have started.
        """
        if sys.platform == "win32" or signal.SIGCHLD in self._before or signal.SIGTERM not in self._before:
            return
        raises = signal.getsignal(signal.SIGCHLD)
        if callable(raises):
            self._before[signal.SIGCHLD] = raises
            signal.signal(signal.SIGCHLD, lambda n, frame: raises(n, frame) if waits_for_workers(frame) else None)


def ending_words(why: str, place: str, saved: tuple[Path, int | None] | None, *, is_writing: bool = False) -> str:
    """The message of a run that ended early; `saved` is its folder and the step of the last checkpoint there.

    >>> ending_words("Ctrl-C", "step 9, epoch 3 of 10", (Path("runs/a"), 9))
    'ended early: Ctrl-C, at step 9, epoch 3 of 10; saved in runs/a: resume=True (`--resume`) continues from there'
    """
    words = f"ended early: {why}, at {place}"
    if why not in ENDINGS:  # the person's own hook or patience: nothing is to go on
        return words
    if saved is None:
        return f"{words}; the model keeps its weights, and nothing is on disk (fit(save='runs/…') makes runs resumable)"
    folder, step = printable(str(saved[0])), saved[1]
    if is_writing:
        return (
            f"{words}; a checkpoint is still being written to {folder}, from which resume=True (`--resume`) continues"
        )
    if step is None:
        return f"{words}; no checkpoint could be written to {folder}"
    at = "" if place.startswith(f"step {step:,},") else f" at step {step:,}"
    return f"{words}; saved in {folder}{at}: resume=True (`--resume`) continues from there"


def is_of_a_loader(error: BaseException) -> bool:
    """Whether an error is a DataLoader's, about workers killed by a signal."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    complains = any(frame.f_globals.get("__name__") in OF_WORKERS for frame in frames)
    return complains and isinstance(error, FAILURES)
