"""Scripts on a GPU that is not here: in processes of their own, with what they did as the result."""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Self

from hotloop.apps.simulate.batch_setting import BatchSetting
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import DATA, WORK
from hotloop.apps.simulate.shim import CannotSimulate, library
from hotloop.apps.simulate.simulation_record import COMPLETED, FAILED, NO_STEPS, SETTLED, Request, Simulation, StepPace
from hotloop.errors import BadArgument
from hotloop.files.cache import cache_folder
from hotloop.files.whole import write_json
from hotloop.printing.text import plural, printable
from hotloop.scripts.as_main import interpreter
from hotloop.scripts.children import Child
from hotloop.scripts.exchange import Exchange
from hotloop.scripts.forks import Forks

LONGEST = 1_000_000  # seconds of a time limit; timers cannot take any number
MOST_GPUS = 16
TIME = "hotloop.apps.simulate.timeline:Time"
MEASURING = 60.0  # seconds that the host's cost may take to measure
TURNS = 3  # branches that are turned, at most
TIME_GRACE = 15.0  # seconds beside the time limit in which a script may end itself


class Simulator:
    """Simulates scripts one after another; torch is imported once, so that each further one starts at once.

    >>> with Simulator() as simulator:  # doctest: +SKIP
    ...     simulator.run("train.py", ["--batch", "64"], card("rtx4090"))
    """

    def __init__(self, *, stdout: IO[Any] | int | None = None, stderr: IO[Any] | int | None = None) -> None:
        self._stdout, self._stderr = stdout, stderr  # of the scripts, as for `subprocess`
        self._stack = ExitStack()
        self._short: dict[tuple[str, tuple[str, ...]], set[tuple[str, int]] | None] = {}  # loops, by script and argv

    def __enter__(self) -> Self:
        start = partial(Child, stdout=self._stdout, stderr=self._stderr)
        forks = Forks("hotloop.apps.simulate.simulation_child", str(library()), start=start)
        with ExitStack() as stack:  # left at once if it cannot begin
            self._forks = stack.enter_context(forks)
            words = self._forks.begun()
            if words is None:
                raise CannotSimulate("the process of the simulated GPU ended", fix="its output says why")
            if "error" in words:
                raise CannotSimulate(words["error"], fix=words["fix"])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self,
        script: Path | str,
        arguments: Sequence[str],
        card: Card,
        *,
        steps: int = 3,
        time_limit: float = 120.0,
        memory_limit: int | None = None,
        listeners: Sequence[str] = (),
        batch: BatchSetting | None = None,
        variant: str | None = None,
        gpus: int = 1,
        like: StepPace | None = None,
        silent: bool = False,
    ) -> Simulation:
        """Run an unmodified script as if the card were there, until it has made its steps.

        `memory_limit` are the bytes of host memory that it may take. `batch` is set in it, where that
        says; `variant` is a change of `variants`; a `silent` one prints nothing.
        The host takes as long for data and other work as in the run `like` this, so that cards can be compared.
        """
        script = Path(script)
        check_script(script)
        if steps < 1 or not 0 < time_limit <= LONGEST:
            raise BadArgument(f"steps={steps}, time_limit={time_limit}", fix="give at least one step and some time")
        if not 1 <= gpus <= MOST_GPUS:
            raise BadArgument(f"gpus={gpus}", fix=f"give 1 to {MOST_GPUS}")
        if batch is not None:
            batch.check(script)
        request = Request(
            script=str(script),
            arguments=tuple(arguments),
            card=card.to_json(),
            steps=steps,
            time_limit=time_limit,
            memory_limit=memory_limit,
            listeners=tuple(listeners),
            batch=batch,
            variant=variant,
            gpus=gpus,
            kept={} if like is None else {DATA: like.data_ms / 1e3, WORK: like.work_ms / 1e3},
            workers=0 if like is None else like.workers,
            host=_host_at_hand() if TIME in listeners else None,
            silent=silent,
        )
        return self._to_its_steps(request)

    def _to_its_steps(self, request: Request) -> Simulation:
        """Where a branch on an invented number ended the script before its memory is known, it goes the other way."""
        found = self._with_short_loops(request)
        for _ in range(TURNS):
            known = found.completed >= min(found.steps, SETTLED)
            if known or found.status not in (COMPLETED, NO_STEPS, FAILED) or not found.branches:
                break
            last = found.branches[-1]
            line = (str(Path(request.script).resolve().parent / last.file), last.line)
            if line in request.turned:
                break
            request = replace(request, turned=(*request.turned, line), silent=True)
            try:
                other = self._with_short_loops(request)
            except CannotSimulate:  # the other way takes the process with it
                break
            if other.completed <= found.completed:
                break
            made = f"after {found.completed} of {plural(found.steps, 'step')}"
            turned = f"{last.file}:{last.line} would have ended the script {made} by an invented value: it went on"
            found = replace(other, notes=(turned, *other.notes))
        return found

    def _with_short_loops(self, request: Request) -> Simulation:
        """Loops that only evaluate have few rounds, and one in later runs; all of them where the script fails else."""
        script = (request.script, request.arguments)
        known = self._short.get(script, set())
        if known is not None:
            found = self._ask(replace(request, shortened=tuple(known)))
            if found.status != FAILED or not found.shortened:
                folder = Path(request.script).resolve().parent
                self._short[script] = known | {(str(folder / loop.file), loop.line) for loop in found.shortened}
                return found
        self._short[script] = None
        return self._ask(replace(request, whole=True))

    def _ask(self, request: Request) -> Simulation:
        with tempfile.TemporaryDirectory(dir=self._forks.folder) as folder:
            exchange = Exchange(Path(folder))
            exchange.ask(request.to_json())
            ended = self._forks.run(exchange, limit=request.time_limit + TIME_GRACE)
            if ended is None:
                raise CannotSimulate("the process of the simulated GPU ended", fix="its output says why")
            return _read(exchange, ended["code"], Path(request.script))


@cache
def _host_at_hand() -> dict[str, Any] | None:
    """What an operation costs the host of this machine, if its GPU can run scripts: measured once, and kept.

    Elsewhere a table says what hosts need.
    """
    from hotloop.device import nvml  # noqa: PLC0415  # which imports torch

    if not nvml.read().cards:
        return None
    about = f"{platform.node()} {platform.python_version()} {importlib.metadata.version('torch')}"
    path = cache_folder("simulate") / f"host-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"
    with suppress(OSError, ValueError):
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept
    command = interpreter("hotloop.apps.simulate.host_cost")
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=MEASURING, check=True).stdout  # noqa: S603
        kept = json.loads(said)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    with suppress(OSError):
        write_json(path, kept)
    return kept


def check_script(script: Path) -> None:
    """Refuse a script that is not there."""
    if not script.is_file():
        raise BadArgument(
            f"there is no file {printable(str(script))}", fix="give the script as you would give it to python"
        )


def _read(exchange: Exchange, code: int | None, script: Path) -> Simulation:
    if (answer := exchange.answered) is not None:
        return Simulation.from_json(answer)
    name = printable(script.name)
    if code is None:
        raise CannotSimulate(f"{name} did not end within its time", fix="give it more time, or fewer steps")
    if code < 0:
        raise CannotSimulate(
            f"the process that ran {name} was ended by signal {-code}",
            fix="a custom CUDA operation or too little host memory can do that; the output above may tell",
        )
    raise CannotSimulate(f"the process that ran {name} ended with code {code}", fix="its output above says why")
