"""A script on the simulated GPU, run as `python script.py` would run it, in the process that was made for it."""

import ast
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hotloop.apps.simulate._torch import fake_files
from hotloop.apps.simulate.evaluations import watched
from hotloop.apps.simulate.samples import Samples
from hotloop.apps.simulate.shim import CannotSimulate
from hotloop.apps.simulate.simulation import Engine
from hotloop.apps.simulate.simulation_record import (
    BEYOND,
    COMPLETED,
    CUT,
    FAILED,
    NO_GPU,
    NO_STEPS,
    SETTLED,
    SHORT,
    Batch,
    Request,
)
from hotloop.apps.simulate.values import Spinning
from hotloop.placement.sites import Site
from hotloop.printing.text import plural
from hotloop.scripts.as_main import Enough, quiet_threads, run_as_main, shown_without
from hotloop.scripts.exchange import Exchange
from hotloop.scripts.training_steps import TRAIN, WITHOUT_STEPS

_OURS, _FAKE = str(Path(__file__).parent), fake_files()
_NCCL = "doesn't have NCCL built in"
_BEYOND = (
    _NCCL,
    "with arguments from the 'CUDA' backend",
    "no rule registered for HigherOrderOp",
    "cannot be simulated",
)
_AGAIN = 2.0  # seconds after which a script that went on is told again that its time is up


class TimeUp(BaseException):
    """The time limit of the simulation has passed."""


class SimulatedScript:
    """A script that is being simulated."""

    def __init__(self, request: Request, exchange: Exchange, engine: Engine, samples: Samples) -> None:
        self._request, self._exchange = request, exchange
        self._engine = engine
        self._samples = samples
        self._folder = Path(request.script).resolve().parent
        self._error: str | None = None
        self._status = COMPLETED
        self._notes: list[str] = []

    def run(self) -> None:
        """Run the script; what was found is written, however it ended."""
        self._engine.on_enough = self._enough
        signal.signal(signal.SIGALRM, _time_up)
        signal.setitimer(signal.ITIMER_REAL, self._request.time_limit, _AGAIN)
        try:
            with self._engine, self._samples, quiet_threads():
                run_as_main(self._request.script, self._arguments(), source=self._code())
                self._engine.gpu.by_hand.finish()
        except BaseException as ending:  # noqa: BLE001  # whatever the script lets through
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._ended(ending)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self._engine.asked:  # else it is written, and what the script did since then does not count
            self._write()

    def _arguments(self) -> tuple[str, ...]:
        """Those of the script, with the batch; or the batch in its environment."""
        given, batch = self._request.arguments, self._request.batch
        if batch is not None and batch.kind == "environment":
            os.environ[batch.name] = str(batch.size)
        return given if batch is None else batch.arguments(given)

    def _code(self) -> ast.Module:
        """What is run in place of the file's text: with the batch in it, and its loops watched."""
        path = Path(self._request.script).absolute()
        parse = ast.parse if self._request.whole else watched
        tree = parse(path.read_bytes(), str(path))
        if self._request.batch is not None:
            self._request.batch.rewrite(tree)
        return tree

    def _enough(self) -> None:
        """All steps are made: what the script does once it is told to end is its own affair."""
        self._write()
        if threading.current_thread() is not threading.main_thread():  # which may wait for this one for ever
            signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)

    def _ended(self, ending: BaseException) -> None:
        if isinstance(ending, Enough):
            return
        if isinstance(ending, TimeUp):
            limit = f"the time limit of {self._request.time_limit:g} s ended the script"
            self._cut(limit, "give it more time: --time-limit", None)
        elif isinstance(ending, Spinning):
            waits = "a loop waits for a value that only a real GPU could compute, and was ended"
            self._cut(waits, "hotloop.simulate(…, values=True) around the training computes it", ending.place)
        elif isinstance(ending, SystemExit):
            self._exited(ending)
        else:
            self._failed(ending)

    def _cut(self, what: str, fix: str, place: Site | None) -> None:
        """It would have gone on. From two steps on its memory is known, since the optimizer's state is there then."""
        where = f" at {Path(place.file).name}:{place.line}" if place else ""
        if self._engine.completed >= SETTLED:
            self._notes.append(f"{what}{where} {self._made}")
            return
        self._status = CUT
        self._engine.findings.add(CUT, f"{what} {self._made}", fix, place or self._whole)

    def _exited(self, ending: SystemExit) -> None:
        if ending.code in (None, 0):
            with suppress(Enough):
                self._engine.gpu.by_hand.finish()
            return
        if not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
        self._status = FAILED
        said = f"exit code {ending.code}" if isinstance(ending.code, int) else repr(str(ending.code))
        self._engine.findings.add(FAILED, f"the script ended itself with {said} {self._made}", "", self._place(ending))

    def _failed(self, error: BaseException) -> None:
        shown = shown_without(error, _OURS, _FAKE, ast.__file__)
        self._error = "".join(shown.format())
        place = self._place(error)
        if isinstance(error, torch.OutOfMemoryError):
            self._status = SHORT
            self._engine.findings.add(SHORT, str(error), "a smaller batch, bf16, checkpointing or accumulation", place)
            return
        kind = type(error).__name__
        first = "".join(shown.format_exception_only()).partition(kind)[2].lstrip(": \n").partition("\n")[0].strip()
        said = f"{kind}: {first}" if first else kind
        if isinstance(error, CannotSimulate) or any(words in said for words in _BEYOND):
            self._status, ended = BEYOND, "the script came to what cannot be simulated"
            said = said.partition(". ")[0].partition(" and mode ")[0]
        else:
            self._status, ended = FAILED, "the script failed"
        self._engine.findings.add(self._status, f"{ended} {self._made}: {said}", self._remedy(error), place)
        if self._engine.evaluations.ended:  # it will run again, with all of their rounds
            return
        sys.stdout.flush()
        print(self._error, end="", file=sys.stderr)

    def _remedy(self, error: BaseException) -> str:
        """What to do about an error that has to do with where it runs."""
        if isinstance(error, CannotSimulate):
            return error.fix or ""
        if isinstance(error, FileNotFoundError) and self._engine.conversions.saved.of(error.filename) is not None:
            return "what a simulated script saves is not written to the disk: leave out what reads it there"
        if _NCCL in str(error):
            return "simulate it without torch.distributed: one process, with the batch of a rank"
        if isinstance(error, ModuleNotFoundError) and error.name:
            name = error.name.partition(".")[0]
            return f"install what has {name} for the Python that runs hotloop: {sys.executable} -m pip install …"
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            return "what the script keeps on the CPU is real: give it a smaller batch or less data"
        return ""

    def _place(self, error: BaseException) -> Site:
        """The innermost line of the person's own that an error came through."""
        if isinstance(error, SyntaxError) and error.filename and error.lineno:
            return Site(error.filename, error.lineno)
        stack = shown_without(error, _OURS, _FAKE, ast.__file__).stack
        own = [frame for frame in stack if frame.filename.startswith(str(self._folder))] or stack
        return Site(own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else self._whole

    @property
    def _whole(self) -> Site:
        return Site(str(Path(self._request.script).absolute()), 0)

    @property
    def _made(self) -> str:
        return f"after {self._engine.completed} of {plural(self._request.steps, 'step')}"

    def _batch(self) -> Batch:
        seen, asked = self._samples, self._request.batch
        size = None if asked is None else asked.size
        samples = seen.samples or (size if seen.numbers else None)
        return Batch(size, "" if asked is None else str(asked), samples, seen.numbers)

    def _write(self) -> None:
        if not self._engine.completed and self._status == COMPLETED:
            self._status = NO_STEPS
            self._engine.findings.add(NO_STEPS, f"the script came to its end {WITHOUT_STEPS}", TRAIN, self._whole)
        elif self._status == COMPLETED and self._engine.find_idle(self._whole):
            self._status = NO_GPU
        if self._status != COMPLETED and self._engine.memory.fits is False:
            self._status = SHORT  # which the script caught, and then it ended
        seen = self._engine.result(self._folder, self._notes, self._status).to_json()
        told = {"batch": self._batch().to_json(), "error": self._error}
        self._exchange.answer({**seen, **told})


def _time_up(_signal: int, _frame: Any) -> None:
    raise TimeUp
