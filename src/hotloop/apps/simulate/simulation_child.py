"""The process in which scripts run on simulated GPUs: torch is imported once, and each script gets a fork of it.

A program: `python -m hotloop.apps.simulate.simulation_child SHIM REQUESTS REPLIES`, where the latter two are open
pipes. Each line of the first is the folder of an `Exchange`; each is answered by a line with how its process ended.
Nothing here may import torch before the shim is loaded.
"""

import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.shim import CannotSimulate, install, load
from hotloop.apps.simulate.simulation_record import Request
from hotloop.scripts.children import end_group, unwound_by_signals
from hotloop.scripts.exchange import Exchange

GRACE = 15.0  # seconds beside the time limit in which a script may end itself
ENDING = 1.0  # seconds from SIGTERM to SIGKILL, for a script and all it started
PAUSE = 0.02
# Imported for every run.
_AHEAD = tuple(f"hotloop.apps.simulate.{name}" for name in ("script", "simulation", "memory", "timeline"))


def main(arguments: Sequence[str]) -> int:
    built, requests, replies = arguments[0], int(arguments[1]), int(arguments[2])
    with suppress(BrokenPipeError), open(replies, "w", encoding="utf-8", closefd=True) as answers:  # a pipe
        try:
            install(load(Path(built)))
            from hotloop.apps.simulate._torch import Shapes  # noqa: PLC0415

            Shapes()  # and what this imports when it is first made
            for module in _AHEAD:
                importlib.import_module(module)
            _read_ahead()
        except CannotSimulate as error:
            _answer(answers, {"error": error.what, "fix": error.fix})
            return error.exit_code
        _answer(answers, {"ready": True})
        with unwound_by_signals():
            for line in _lines(requests):
                _answer(answers, {"code": _serve(Exchange(Path(line.rstrip("\n"))), requests, replies)})
    return 0


def _read_ahead() -> None:
    """Read the tables that every run asks, and let no garbage collection touch what forks can share."""
    from hotloop.apps.simulate.library_memory import measured_operations, tables  # noqa: PLC0415
    from hotloop.apps.simulate.table import default_host, default_table  # noqa: PLC0415

    for read in (tables, measured_operations, default_host, default_table):
        read()
    gc.collect()
    gc.freeze()


def _serve(exchange: Exchange, requests: int, replies: int) -> int | None:
    """Run a script in a fork; its exit code, negative for a signal, None where it took too long."""
    request = Request.from_json(exchange.request)
    runner = _Runner(os.fork())
    if not runner.pid:
        os.setpgid(0, 0)
        _become(request, exchange, requests, replies)
    with suppress(OSError):  # whichever of the two comes first
        os.setpgid(runner.pid, runner.pid)
    try:
        runner.ends_within(request.time_limit + GRACE, unless=[requests])
        return runner.code
    finally:
        end_group(runner.pid, runner.ends_within, ENDING)
        runner.ends_within(math.inf)


class _Runner:
    """A script's process. It leads a group of its own, so that what it starts ends with it and this process goes on."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def ends_within(self, seconds: float, unless: Sequence[int] = ()) -> bool:
        """Wait for its end, unless one of these pipes can be read: only the end of whoever asked makes that so."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline or select.select(unless, [], [], PAUSE)[0]:
                return False
        return True


def _become(request: Request, exchange: Exchange, requests: int, replies: int) -> None:
    """Be the script's process, to its end: exit handlers of the one that forked are not ours to run."""
    code = 1
    try:
        os.close(requests)
        os.close(replies)
        for ending in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(ending, signal.SIG_DFL)
        _limit_memory(request.memory_limit)
        if request.silent:
            _silence()
        from hotloop.apps.simulate.samples import Samples  # noqa: PLC0415
        from hotloop.apps.simulate.script import SimulatedScript  # noqa: PLC0415
        from hotloop.apps.simulate.simulation import Engine  # noqa: PLC0415
        from hotloop.apps.simulate.table import HostCost  # noqa: PLC0415
        from hotloop.apps.simulate.timeline import Time  # noqa: PLC0415

        card, samples = Card.from_json(request.card), Samples()
        listeners = [*(_listener(name, card) for name in request.listeners), samples]
        for each in listeners:
            if isinstance(each, Time) and request.host is not None:
                each.host_cost = HostCost.from_json(request.host)
        engine = Engine(card, listeners, request.steps, others=_others(request, card))
        engine.gpu.between.tell_instead(request.kept, request.workers)
        engine.gpu.values.branches.turned.update(request.turned)
        engine.evaluations.known.update(request.shortened)
        engine.evaluations.whole = request.whole
        SimulatedScript(request, exchange, engine, samples).run()
        code = 0
    except BaseException:  # noqa: BLE001
        import traceback  # noqa: PLC0415

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _silence() -> None:
    """Whatever is printed from now on, below Python too, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    os.close(nowhere)


def _lines(pipe: int) -> Any:
    with open(pipe, encoding="utf-8", closefd=False) as lines:
        yield from iter(lines.readline, "")


def _answer(pipe: Any, words: dict[str, Any]) -> None:
    pipe.write(json.dumps(words) + "\n")
    pipe.flush()


def _limit_memory(limit: int | None) -> None:
    """Should the host run out of memory, this process is to be the one that ends, and none of the person's others."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if limit is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _listener(name: str, card: Card) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)(card)


def _others(request: Request, card: Card) -> list[Any]:
    """Who keeps the memory of each GPU after the first."""
    if request.gpus == 1:
        return []
    name = next((each for each in request.listeners if hasattr(_listener(each, card), "memory_stats")), None)
    return [_listener(name or "hotloop.apps.simulate.syncs:Syncs", card) for _ in range(request.gpus - 1)]


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # at once: it has said all, and to take torch down would take a second
