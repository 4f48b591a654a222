"""The loop behind the live view: sample, draw, and do what keys and signals ask for."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

from rich.console import Console, ConsoleDimensions, Group
from rich.control import Control
from rich.screen import Screen

from hotloop.apps.top.advice import Advice
from hotloop.apps.top.cells import in_encoding
from hotloop.apps.top.history import History
from hotloop.apps.top.keys import ENDINGS, RESIZE, SUSPEND, TERMINATE, Keys
from hotloop.apps.top.view import screen
from hotloop.apps.top.view_options import ViewOptions, press
from hotloop.monitor.reading import Reading

MINUTE = 60.0
DONE, QUIT = "done", "quit"
SOON = 0.5  # seconds from the first sample to the second: rates are known from then on
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"  # terminals differ in how wide they draw rare characters; no line may break
TERMINATED = 128 + signal.SIGTERM  # the exit code after SIGTERM, as shells report it

Read = Callable[[], Reading]
Advise = Callable[[Reading], Sequence[Advice]]
Keep = Callable[[Reading, Sequence[Advice]], None]


def run(
    read: Read,
    advise: Advise,
    *,
    every: float = 1.0,
    count: int | None = None,
    keep: Keep | None = None,
    options: ViewOptions = ViewOptions(),  # noqa: B008  # frozen
    console: Console | None = None,
    stdin: TextIO | None = None,
) -> None:
    """Show readings until the person quits, or for so many samples; the terminal is left as it was."""
    view = _View(read, advise, every, count, keep, options, console or Console(force_terminal=True, highlight=False))
    keyboard = sys.stdin if stdin is None else stdin
    while (ending := view.show(keyboard)) == SUSPEND:
        os.kill(os.getpid(), signal.SIGTSTP)  # stops here, with a restored terminal, until the shell goes on with it
    if ending == TERMINATE:
        raise SystemExit(TERMINATED)


class _View:
    """What is on the screen, and what will be."""

    def __init__(
        self,
        read: Read,
        advise: Advise,
        every: float,
        count: int | None,
        keep: Keep | None,
        options: ViewOptions,
        console: Console,
    ) -> None:
        self.read, self.advise, self.keep = read, advise, keep
        self.every = every
        self.left = count
        self.options = options
        self.console = console
        self.history = History(max(MINUTE, 20 * every), every)
        self.reading: Reading | None = None
        self.advice: Sequence[Advice] = ()

    def show(self, stdin: TextIO | None) -> str:
        """Sample and draw until something ends it: the name of that."""
        due = time.monotonic()
        with Keys(stdin) as keys, _whole_screen(self.console):
            self.options = replace(self.options, keys=keys.heard)
            while True:
                if time.monotonic() >= due:
                    if self.left == 0:
                        return DONE
                    first = self.reading is None
                    self.sample()
                    due = max(due + (min(SOON, self.every) if first else self.every), time.monotonic())
                self.draw()
                event = keys.wait(due - time.monotonic())
                while event is not None:  # all that were pressed meanwhile, before the next look at the hardware
                    if event == SUSPEND or event in ENDINGS:
                        return event
                    if event != RESIZE and not self.press(event):
                        return QUIT
                    event = keys.wait(0)

    def sample(self) -> None:
        """Look at the hardware once more."""
        self.reading = self.read()
        self.history.add(self.reading)
        self.advice = self.advise(self.reading)
        if self.keep is not None:
            self.keep(self.reading, self.advice)
        if self.left is not None:
            self.left -= 1

    def press(self, key: str) -> bool:
        """Do what a key asks for; False where that is to quit."""
        changed = press(self.options, key)
        if changed is not None:
            most = 0 if self.reading is None else sum(len(gpu.processes or ()) for gpu in self.reading.gpus)
            self.options = replace(changed, skipped=min(changed.skipped, most))
        return changed is not None

    def draw(self) -> None:
        """Put everything on the screen, in one piece and for the size that it has now."""
        assert self.reading is not None
        width, height = self.console.size = _size(self.console)
        lines = screen(self.reading, self.history, self.advice, width=width, height=height, options=self.options)
        with self.console:  # one write, so that nothing flickers
            self.console.control(Control.home())
            self.console.print(Screen(Group(*in_encoding(lines, self.console.encoding))), end="")


@contextmanager
def _whole_screen(console: Console) -> Iterator[None]:
    """The terminal's other screen, without a cursor and without breaking lines."""
    with console.screen():
        console.file.write(NO_WRAP)
        try:
            yield
        finally:
            console.file.write(WRAP)


def _size(console: Console) -> ConsoleDimensions:
    """What the terminal says now; rich would prefer what COLUMNS said when the program began."""
    try:
        width, height = os.get_terminal_size(console.file.fileno())
    except (OSError, ValueError):
        width = height = 0
    return ConsoleDimensions(width or 80, height or 24)
