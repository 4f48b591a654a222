"""The process in which scripts run on simulated GPUs: torch is imported once, and each script gets a fork of it.

A program: `python -m hotloop.apps.simulate.simulation_child SHIM FOLDER`, started by `Forks`. Nothing here may import
torch before the shim is loaded.
"""

import gc
import importlib
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.shim import CannotSimulate, install, load
from hotloop.apps.simulate.simulation_record import Request
from hotloop.scripts.exchange import Exchange
from hotloop.scripts.forks import serve

HOST = 0.8  # share of the free memory that such a run may take
# Imported for every run.
_AHEAD = tuple(f"hotloop.apps.simulate.{name}" for name in ("script", "simulation", "memory", "timeline"))


def main(arguments: Sequence[str]) -> int:
    built, folder = map(Path, arguments)
    try:
        install(load(built))
        from hotloop.apps.simulate._torch import Shapes  # noqa: PLC0415

        Shapes()  # and what this imports when it is first made
        for module in _AHEAD:
            importlib.import_module(module)
        _read_ahead()
    except CannotSimulate as error:
        Exchange(folder).answer({"error": error.what, "fix": error.fix})
        return error.exit_code
    serve(folder, _become)
    return 0


def _read_ahead() -> None:
    """Read the tables that every run asks, and let no garbage collection touch what forks can share."""
    from hotloop.apps.simulate.library_memory import measured_operations, tables  # noqa: PLC0415
    from hotloop.apps.simulate.table import default_host, default_table  # noqa: PLC0415

    for read in (tables, measured_operations, default_host, default_table):
        read()
    gc.collect()
    gc.freeze()


def _become(exchange: Exchange) -> NoReturn:
    """Be the script's process, to its end: exit handlers of the one that forked are not ours to run."""
    code = 1
    try:
        request = Request.from_json(exchange.request)
        _spare_the_host(request)
        if request.silent:
            _silence()
        from hotloop.apps.simulate.samples import Samples  # noqa: PLC0415
        from hotloop.apps.simulate.script import SimulatedScript  # noqa: PLC0415
        from hotloop.apps.simulate.simulation import Engine  # noqa: PLC0415
        from hotloop.apps.simulate.timeline import Time  # noqa: PLC0415

        card, samples = Card.from_json(request.card), Samples()
        listeners = [*(_listener(name, card) for name in request.listeners), *[Time(card)] * request.timed, samples]
        engine = Engine(card, listeners, request.steps)
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


def _spare_the_host(request: Request) -> None:
    """Should the host run out of memory, this process is to be the one that ends, and none of the person's others.

    One with another batch than the script's own has its limit.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if request.batch is not None:
        limit = int(HOST * psutil.virtual_memory().available)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _listener(name: str, card: Card) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)(card)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # at once: it has said all, and to take torch down would take a second
