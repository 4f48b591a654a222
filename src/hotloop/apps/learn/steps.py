"""The steps of a lesson, run in a process of their own, within the limits of a check."""

import codecs
import json
import os
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from hotloop.apps.learn.checking import LOOK, MEMORY, TIME, memory_of
from hotloop.printing.text import duration, size
from hotloop.scripts.as_main import interpreter
from hotloop.scripts.children import Child

START = 120.0  # seconds for the process to import torch, before the time of a step counts
LONGEST = 200_000  # characters of one step's output that are shown


@dataclass(frozen=True)
class StepEnd:
    """How a step ended."""

    error: str | None  # the name of the error's class
    ended: str = ""  # why the process was ended; what earlier steps had made is gone then
    seconds: float = 0.0


class StepProcess:
    """Runs the steps of one lesson in one process: what one defines the next ones know.

    The process is a leader of its own group, in a temporary folder, with the person's rights. Methods block; `end` may
    be called from another thread while a step runs.
    """

    def __init__(self, lesson: int, *, limit: float = TIME, memory: int = MEMORY) -> None:
        self._lesson, self._limit, self._memory = lesson, limit, memory
        self._stack: ExitStack | None = None
        self._read: queue.Queue[bytes] = queue.Queue()
        self._ready = threading.Event()
        self._stopped = ""
        self._lock = threading.Lock()  # of starting and ending

    @property
    def alive(self) -> bool:
        return self._stack is not None and not self._stopped

    def start(self) -> None:
        """Begin to import torch; a step that is run starts the process too."""
        with self._lock:
            if self._stack is not None:
                return
            self._stopped, self._read, self._ready = "", queue.Queue(), threading.Event()
            with ExitStack() as stack:  # undone if something fails on the way
                folder = tempfile.TemporaryDirectory(prefix="hotloop-learn-", ignore_cleanup_errors=True)
                cwd = Path(stack.enter_context(folder), "work")
                cwd.mkdir()
                (asked, ask), (told, tell) = os.pipe(), os.pipe()
                command = [*interpreter("hotloop.apps.learn.kernel"), str(self._lesson)]
                self._child = Child(command, grace=0.0, cwd=cwd, stdin=asked, stdout=tell, stderr=tell)
                try:
                    stack.enter_context(self._child)
                except BaseException:
                    os.close(ask)
                    os.close(told)
                    raise
                finally:
                    os.close(asked)
                    os.close(tell)
                stack.callback(os.close, ask)
                self._ask = ask
                threading.Thread(target=_drain, args=(told, self._read, self._ready), name="steps", daemon=True).start()
                self._stack = stack.pop_all()

    def end(self, why: str = "it was ended.") -> None:
        """End the process and all that it started."""
        with self._lock:
            if self._stack is not None:
                self._stopped = self._stopped or why
                stack, self._stack = self._stack, None
                stack.close()

    def run(self, step: int, code: str, tell: Callable[[str], None]) -> StepEnd:
        """Run the code of a step; `tell` gets what it prints as it prints it."""
        self.start()
        mark = secrets.token_hex(16)
        mine, read, ready = self._child, self._read, self._ready
        with suppress(OSError):  # it has ended: the next read says so
            request = json.dumps({"step": step, "code": code, "mark": mark}) + "\n"
            with os.fdopen(os.dup(self._ask), "w", encoding="utf-8") as pipe:
                pipe.write(request)
        output = _Output(mark, tell)
        ready.wait(START)
        begun = time.monotonic()
        while not output.over:
            try:
                piece = read.get(timeout=LOOK)
            except queue.Empty:
                piece = None
            if piece:
                output.take(piece)
            elif piece is not None and self._child is mine:
                self.end("its process ended; does it call os._exit or os.kill?")
            if not output.over and not (self.alive and self._child is mine):
                # What it started may have left its group and hold the pipe: nobody waits for the pipe's end.
                output.flush()
                return StepEnd(None, self._stopped or "it was ended.", time.monotonic() - begun)
            self._watch(begun)
        return StepEnd(output.error, "", time.monotonic() - begun)

    def _watch(self, begun: float) -> None:
        """End the process where it takes too long or too much."""
        if time.monotonic() - begun > self._limit:
            self.end(f"it was still running after {duration(self._limit)} and was ended: a loop without an end?")
        elif self.alive and (taken := memory_of(self._child.pid)) > self._memory:
            self.end(f"it took {size(taken)} of memory, more than {size(self._memory)}, and was ended.")


def _drain(told: int, into: "queue.Queue[bytes]", ready: threading.Event) -> None:
    """Read what the process writes, until nobody can write any more: an empty piece."""
    while piece := os.read(told, 65536):
        if not ready.is_set() and b"\0" in piece:
            piece = piece.replace(b"\0", b"", 1)
            ready.set()
        if piece:
            into.put(piece)
    ready.set()  # or never
    into.put(b"")
    os.close(told)


class _Output:
    """Tells the printed words apart from the mark that ends a step."""

    def __init__(self, mark: str, tell: Callable[[str], None]) -> None:
        self.over = False
        self.error: str | None = None
        self._mark, self._tell = f"\0{mark}", tell
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._rest, self._room = "", LONGEST

    def take(self, piece: bytes) -> None:
        self._rest += self._decode(piece)
        before, found, after = self._rest.partition(self._mark)
        if found and "\0" in after:
            self._say(before)
            self.over, self.error = True, json.loads(after.partition("\0")[0])["error"]
        elif not found:
            held = self._rest.rfind("\0", -len(self._mark))  # it may be the beginning of the mark
            keep = len(self._rest) if held < 0 else held
            self._say(self._rest[:keep])
            self._rest = self._rest[keep:]

    def flush(self) -> None:
        self._say(self._rest)

    def _say(self, words: str) -> None:
        if words and self._room:
            self._tell(words[: self._room])
            if len(words) > self._room:
                self._tell("\n… the rest of the output is not shown\n")
            self._room = max(0, self._room - len(words))
