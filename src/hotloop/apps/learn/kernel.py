"""The process in which the steps of one lesson run: `python -m hotloop.apps.learn.kernel LESSON`.

It writes a zero byte when it is ready, and reads a line of JSON for each step. All that the step prints, from processes
that it starts too, goes to standard output; then a mark that the request brought says that the step has ended, and how.
"""

import json
import os
import queue
import sys
import threading
from dataclasses import replace
from typing import Any

from hotloop.apps.learn.judging import explain
from hotloop.apps.learn.lesson import lesson
from hotloop.apps.learn.lesson_run import Session


def main() -> None:
    """Run steps until the other end of the pipe is closed."""
    requests = _requests()
    chosen = lesson(int(sys.argv[1]))
    steps = {step.number: step for step in chosen.steps}
    session = Session(chosen)
    import torch  # noqa: F401, PLC0415  # the seconds of its import are over before the first step is asked for

    _write("\0")
    while True:
        request = requests.get()
        step = replace(steps[request["step"]], code=request["code"])
        try:
            error = session.run(step, _write).error
        except BaseException as raised:  # noqa: BLE001  # sys.exit of a step would end the lesson
            _write(f"{type(raised).__name__}: {explain(raised)}\n")
            error = raised
        sys.stdout.flush()
        sys.stderr.flush()
        _write(f"\0{request['mark']}{json.dumps({'error': error and type(error).__name__})}\0")


def _requests() -> "queue.Queue[dict[str, Any]]":
    """What the parent asks for. When it has gone, so has this process, whatever a step is doing."""
    asked: queue.Queue[dict[str, Any]] = queue.Queue()
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # input() in a step finds nobody, rather than the next request

    def read() -> None:
        for line in lines:
            asked.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    return asked


def _write(words: str) -> None:
    """To the pipe itself, so that words of Python and of other processes come in their order."""
    rest = memoryview(words.encode("utf-8", errors="replace"))
    while rest:
        rest = rest[os.write(1, rest) :]


if __name__ == "__main__":
    main()
