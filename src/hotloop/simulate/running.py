"""Scripts on a GPU that is not here: in processes of their own, with what they did as the result."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from hotloop.errors import BadArgument
from hotloop.simulate.record import Simulation
from hotloop.simulate.request import Request
from hotloop.simulate.shim import CannotSimulate, library
from hotloop.simulate.ways import Way
from hotloop.text import printable


class Simulator:
    """Simulates scripts one after another; torch is imported once, so that each further one starts at once.

    >>> with Simulator() as simulator:  # doctest: +SKIP
    ...     simulator.run("train.py", ["--batch", "64"], card("rtx4090"))
    """

    def __init__(self, *, stdout: IO[Any] | int | None = None, stderr: IO[Any] | int | None = None) -> None:
        self._stdout, self._stderr = stdout, stderr  # of the scripts, as for `subprocess`
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        built = library()
        theirs, requests = os.pipe()
        answers, ours = os.pipe()
        command = [sys.executable, "-m", "hotloop.simulate.child", str(built), str(theirs), str(ours)]
        self._child = subprocess.Popen(  # noqa: S603
            command, pass_fds=(theirs, ours), stdout=self._stdout, stderr=self._stderr
        )
        os.close(theirs)
        os.close(ours)
        self._requests = os.fdopen(requests, "w", encoding="utf-8")
        self._answers = os.fdopen(answers, encoding="utf-8")
        try:
            self._hear()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            self._requests.close()  # ends the child, and the script that it runs
        self._answers.close()
        if self._child is not None:
            self._child.wait()
            self._child = None

    def run(
        self,
        script: Path | str,
        arguments: Sequence[str],
        card: Any,
        *,
        steps: int = 3,
        time_limit: float = 120.0,
        memory_limit: int | None = None,
        listeners: Sequence[str] = (),
        values: bool = False,
        batch: int | None = None,
        batch_from: str | None = None,
        variant: str | None = None,
        silent: bool = False,
    ) -> Simulation:
        """Run an unmodified script as if the card were there, until it has made its steps.

        `memory_limit` are the bytes of host memory that it may take; with `values` they are computed on the host too,
        so that what depends on them is as it would be. `batch` is set in it wherever it is found, or as
        `batch_from` says, in the words of `Way`; `variant` is a change of `variants`; a `silent` one prints nothing.
        """
        script = Path(script)
        if not script.is_file():
            raise BadArgument(
                f"there is no file {printable(str(script))}", fix="give the script as you would give it to python"
            )
        if steps < 1 or time_limit <= 0:
            raise BadArgument(f"steps={steps}, time_limit={time_limit}", fix="give at least one step and some time")
        if batch is not None and batch < 1:
            raise BadArgument(f"batch={batch}", fix="give a batch of at least 1")
        if batch_from is not None:
            Way.parsed(batch_from)
        with tempfile.TemporaryDirectory(prefix="hotloop-") as folder:
            result = Path(folder, "simulation.json")
            request = Request(
                script=str(script),
                arguments=tuple(arguments),
                card=dict(card.to_json() if hasattr(card, "to_json") else vars(card)),
                result=str(result),
                steps=steps,
                time_limit=time_limit,
                memory_limit=memory_limit,
                listeners=tuple(listeners),
                values=values,
                batch=batch,
                batch_from=batch_from,
                variant=variant,
                silent=silent,
            )
            with suppress(BrokenPipeError):  # then there is no answer either, which is told
                self._requests.write(json.dumps(request.to_json()) + "\n")
                self._requests.flush()
            return _read(result, self._hear()["code"], script)

    def _hear(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise CannotSimulate("the process of the simulated GPU ended", fix="its output says why")
        words: dict[str, Any] = json.loads(line)
        if "error" in words:
            raise CannotSimulate(words["error"], fix=words["fix"])
        return words


def simulate_script(
    script: Path | str,
    arguments: Sequence[str],
    card: Any,
    *,
    steps: int = 3,
    time_limit: float = 120.0,
    listeners: Sequence[str] = (),
    values: bool = False,
    stdout: IO[Any] | int | None = None,
    stderr: IO[Any] | int | None = None,
) -> Simulation:
    """Run one unmodified script as if a GPU were there, until it has made its steps.

    Listeners are named by where they are imported from, as in "hotloop.simulate.memory:Memory", and built with the
    card in the process that runs the script. `stdout` and `stderr` are where its output goes, as for `subprocess`.
    """
    with Simulator(stdout=stdout, stderr=stderr) as simulator:
        return simulator.run(
            script, arguments, card, steps=steps, time_limit=time_limit, listeners=listeners, values=values
        )


def _read(result: Path, code: int | None, script: Path) -> Simulation:
    with suppress(OSError, ValueError):
        return Simulation.from_json(json.loads(result.read_text()))
    name = printable(script.name)
    if code is None:
        raise CannotSimulate(f"{name} did not end within its time", fix="give it more time, or fewer steps")
    if code < 0:
        raise CannotSimulate(
            f"the process that ran {name} was ended by signal {-code}",
            fix="a custom CUDA operation or too little host memory can do that; the output above may tell",
        )
    raise CannotSimulate(f"the process that ran {name} ended with code {code}", fix="its output above says why")
