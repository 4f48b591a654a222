"""A program and everything that it starts, ended as one."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self

GRACE = 5.0  # seconds to end in after SIGTERM, before SIGKILL
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has but one, which is as final


class Child:
    """A program in a session of its own, so that it and all it started end with the block, however the block ends.

    SIGTERM and SIGHUP (a closed terminal) leave the block as `SystemExit` does. Ctrl-C reaches only this process, as
    `KeyboardInterrupt`; `interrupt` hands it on to a program that is to end by itself.

    >>> with Child([sys.executable, "train.py"]) as child:  # doctest: +SKIP
    ...     code = child.wait()
    """

    def __init__(self, command: Sequence[str], *, grace: float = GRACE, **options: Any) -> None:
        """`options` are those of `subprocess.Popen`."""
        self._command, self._grace, self._options = list(command), grace, options
        self._stack = ExitStack()
        self._process: subprocess.Popen[Any]

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # undone if something fails on the way
            stack.enter_context(unwound_by_signals())
            self._process = subprocess.Popen(self._command, start_new_session=True, **self._options)  # noqa: S603
            stack.callback(self.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, negative for a signal; None where it still runs after `timeout` seconds."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        signal_group(self.pid, KILL)  # what it started and left behind
        return code

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: SIGINT for the whole group."""
        signal_group(self.pid, signal.SIGINT)

    def end(self, *, grace: float | None = None) -> None:
        """SIGTERM for the whole group, and SIGKILL for what is left of it `grace` seconds later."""
        if self._process.returncode is None:  # else its number may be another's by now
            end_group(self.pid, lambda seconds: self.wait(seconds) is not None, self._grace if grace is None else grace)
            self._process.wait()


def end_group(leader: int, ends_within: Callable[[float], bool], grace: float = GRACE) -> None:
    """End a process group, politely first; `ends_within` waits some seconds and tells whether its leader has ended."""
    try:
        if not ends_within(0.0):
            signal_group(leader, signal.SIGTERM)
            ends_within(grace)
    finally:  # also where a second signal cuts the grace short
        signal_group(leader, KILL)


def signal_group(leader: int, which: int) -> None:
    """Send a signal to a process group, which may be gone."""
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        if sys.platform == "win32":  # no groups there that could be ended
            os.kill(leader, which)
        else:
            os.killpg(leader, which)


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `SystemExit`, so that every `with` and `finally` around is left in order.

    What somebody else handles or ignores (nohup) stays as it is, and so does everything outside the main thread.
    """
    changed = []
    try:
        for name in ("SIGTERM", "SIGHUP"):  # Windows has but the first
            which = getattr(signal, name, None)
            if which is not None and signal.getsignal(which) is signal.SIG_DFL:
                with suppress(ValueError):  # outside the main thread
                    signal.signal(which, _exit)
                    changed.append(which)
        yield
    finally:
        for which in changed:
            signal.signal(which, signal.SIG_DFL)


def _exit(which: int, _frame: Any) -> None:
    raise SystemExit(128 + which)
