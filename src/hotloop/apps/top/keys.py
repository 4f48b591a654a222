"""Keys and signals of a terminal, one at a time and without blocking; the terminal is restored whatever happens."""

import codecs
import os
import re
import select
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from types import FrameType, MappingProxyType
from typing import Any, Self, TextIO

try:
    import termios
    import tty
except ImportError:  # Windows: no keys there, and Ctrl-C ends the view
    termios = None  # type: ignore[assignment]

RESIZE, SUSPEND, INTERRUPT, TERMINATE, HANGUP = "resize", "suspend", "interrupt", "terminate", "hang up"
ENDINGS = frozenset({INTERRUPT, TERMINATE, HANGUP})
MEANINGS = MappingProxyType(
    {
        int(getattr(signal, name)): what
        for name, what in {
            "SIGWINCH": RESIZE,
            "SIGTSTP": SUSPEND,
            "SIGINT": INTERRUPT,
            "SIGTERM": TERMINATE,
            "SIGHUP": HANGUP,
        }.items()
        if hasattr(signal, name)  # Windows has few of them
    }
)
NAMES = MappingProxyType(
    {
        "\r": "enter",
        "\n": "enter",
        "\x7f": "backspace",
        "\b": "backspace",
        "\x1b": "escape",
        "\x1b[A": "up",
        "\x1b[B": "down",
        "\x1bOA": "up",
        "\x1bOB": "down",
        "\x1b[5~": "page up",
        "\x1b[6~": "page down",
    }
)
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O[ -~]|[^\[O])")  # what a key sends that is not a character
UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")
ESCAPE_WAIT = 0.05  # seconds in which the rest of a sequence comes, if it is one and not the key Esc
LONGEST_SEQUENCE = 64  # characters of a sequence; what is longer is no key


def split(text: str) -> tuple[list[str], str]:
    """The keys in what a terminal sent, and the beginning of one that is not whole yet.

    >>> split("m" + chr(27) + "[A" + chr(27) + "[")
    (['m', 'up'], '\\x1b[')
    """
    keys: list[str] = []
    while text:
        if text[0] != "\x1b":
            token = text[0]
        elif whole := SEQUENCE.match(text):
            token = whole[0]
        elif UNFINISHED.match(text) and len(text) < LONGEST_SEQUENCE:
            return keys, text
        else:
            token = text[0]
        text = text[len(token) :]
        name = NAMES.get(token, token)
        if name.isprintable():  # a sequence or a control character without a name is no key of ours
            keys.append(name)
    return keys, ""


class Keys:
    """A context in which keys come singly and are not echoed, and in which signals come as if they were keys.

    The view can then leave in its own time, with the terminal as it was. A second Ctrl-C or SIGTERM that finds the
    first one still waiting does not wait for it.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._fd = _terminal(stream)
        self._settings: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._ending = False  # whether an ending was asked for that nobody has seen yet
        self._waiting: deque[str] = deque()
        self._begun = ""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    @property
    def heard(self) -> bool:
        """Whether there are keys to press, and not only signals."""
        return self._fd is not None

    def __enter__(self) -> Self:
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        try:
            self._listen()
            if self._fd is not None:
                self._settings = termios.tcgetattr(self._fd)
                tty.setcbreak(self._fd, termios.TCSADRAIN)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def wait(self, seconds: float) -> str | None:
        """The next key or signal; None where none comes in so many seconds."""
        if termios is None:
            time.sleep(max(seconds, 0))
            return None
        ends = time.monotonic() + seconds
        while not self._waiting:
            left = ends - time.monotonic()
            self._take(ESCAPE_WAIT if self._begun else left)
            if not self._waiting and left <= 0:
                return None
        event = self._waiting.popleft()
        self._ending = self._ending and event not in ENDINGS
        return event

    def _take(self, seconds: float) -> None:
        """Whatever there is to read, in at most so many seconds."""
        heard = [self._woken] if self._fd is None else [self._woken, self._fd]
        ready, _, _ = select.select(heard, [], [], max(seconds, 0))
        if self._woken in ready:
            self._waiting.extend(MEANINGS[number] for number in os.read(self._woken, 64))
        if self._fd is not None and self._fd in ready:
            self._read(self._fd)
        elif not ready and self._begun:  # nothing followed: it was the key Esc
            self._waiting.append("escape")
            self._begun = ""

    def _read(self, fd: int) -> None:
        try:
            sent = os.read(fd, 1024)
        except OSError:
            sent = b""
        if not sent:  # the terminal is gone
            self._fd = None
            self._waiting.append(HANGUP)
            return
        keys, self._begun = split(self._begun + self._decode(sent))
        self._waiting.extend(keys)

    def _listen(self) -> None:
        """Take signals over, but for those that someone has chosen to ignore, as nohup does."""
        if termios is None or threading.current_thread() is not threading.main_thread():
            return
        for number in MEANINGS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if MEANINGS[number] in ENDINGS:
            if self._ending:
                raise KeyboardInterrupt
            self._ending = True
        with suppress(BlockingIOError):  # a pipe full of signals that nobody has seen tells enough
            os.write(self._wake, bytes([number]))

    def _restore(self) -> None:
        try:
            if self._settings is not None and self._fd is not None:
                with suppress(termios.error):  # a terminal that is gone needs nothing
                    termios.tcsetattr(self._fd, termios.TCSADRAIN, self._settings)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()
            os.close(self._woken)
            os.close(self._wake)


def _terminal(stream: TextIO | None) -> int | None:
    """The number of the terminal behind a stream; None where it is none."""
    if stream is None or termios is None:
        return None
    try:
        return stream.fileno() if stream.isatty() else None
    except (OSError, ValueError):  # closed, or not a file at all
        return None
