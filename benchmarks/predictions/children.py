"""Processes forked from one that has imported torch and not touched CUDA; they are spoken with in lines."""

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Tell = Callable[[dict[str, Any]], None]
Hear = Callable[[], str]


class Child:
    """A forked process that does one job; the job is given how to tell something and how to hear the next word."""

    def __init__(self, job: Callable[[Tell, Hear], None]) -> None:
        told, tell = os.pipe()
        words, say = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(told)
            os.close(say)
            _live(job, tell, words)
        os.close(tell)
        os.close(words)
        self._told, self._say = told, say
        self._rest = b""

    def say(self, word: str) -> None:
        with suppress(BrokenPipeError):
            os.write(self._say, word.encode() + b"\n")

    def hear(self, until: float) -> dict[str, Any] | None:
        """What the child tells next; None where it ends first, or the time (of `time.monotonic`) comes."""
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._told], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            more = os.read(self._told, 65536)
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def end(self) -> None:
        """Let it end, or end it; returns when it is gone."""
        self.say("end")
        os.close(self._say)
        for _ in range(100):
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                break
            time.sleep(0.05)
        else:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._told)


def _live(job: Callable[[Tell, Hear], None], tell: int, words: int) -> None:
    """Be the child, to its end: what the one that forked has still to do is not ours."""
    heard = os.fdopen(words)

    def telling(what: dict[str, Any]) -> None:
        os.write(tell, json.dumps(what).encode() + b"\n")

    try:
        job(telling, lambda: heard.readline().strip())
    except BaseException as error:  # noqa: BLE001  # a forked process must not go on as its parent
        with suppress(BrokenPipeError):
            telling({"error": "".join(traceback.format_exception_only(error)).strip()[-400:]})
    os._exit(0)
