"""Scripts on a GPU that is not here: in processes of their own, with what they did as the result."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.shim import CannotSimulate, library
from hotloop.apps.simulate.simulation_record import FAILED, Request, Simulation
from hotloop.errors import BadArgument
from hotloop.printing.text import printable
from hotloop.scripts.children import Child
from hotloop.scripts.exchange import Exchange
from hotloop.scripts.forks import Forks

LONGEST = 1_000_000  # seconds of a time limit; timers cannot take any number
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

    def run(self, script: Path | str, arguments: Sequence[str], card: Card, **options: Any) -> Simulation:
        """Run an unmodified script as if the card were there, until it has made its steps.

        `options` are other fields of `Request`.
        """
        check_script(Path(script))
        request = Request(str(script), tuple(arguments), card.to_json(), **options)
        if request.steps < 1 or not 0 < request.time_limit <= LONGEST:
            told = f"steps={request.steps}, time_limit={request.time_limit}"
            raise BadArgument(told, fix="give at least one step and some time")
        if request.batch is not None:
            request.batch.check(Path(script))
        return self._with_short_loops(request)

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
