"""A script on the simulated GPU, run as `python script.py` would run it, in the process that was made for it."""

import signal
import sys
from importlib.util import decode_source
from pathlib import Path
from typing import Any

import torch

from hotloop.files import write_json
from hotloop.scripts import Enough, quiet_threads, run_as_main, shown_without
from hotloop.simulate.batches import Batches
from hotloop.simulate.events import Place
from hotloop.simulate.record import Batch
from hotloop.simulate.request import Request
from hotloop.simulate.simulation import Engine
from hotloop.simulate.values import Spinning
from hotloop.simulate.variants import change_of
from hotloop.text import plural

_OURS, _FAKE = str(Path(__file__).parent), str(Path(torch.__file__).parent / "_subclasses")
_AGAIN = 2.0  # seconds after which a script that went on is told again that its time is up


class TimeUp(BaseException):
    """The time limit of the simulation has passed."""


def batches_of(request: Request) -> Batches:
    """Who finds and sets the batch of the script; also a listener of its run."""
    try:
        source = decode_source(Path(request.script).read_bytes())
    except (SyntaxError, UnicodeError):  # Python will say so
        source = ""
    return Batches(source, request.batch, request.batch_from)


class Run:
    """A script that is being simulated."""

    def __init__(self, request: Request, engine: Engine, batches: Batches) -> None:
        self._request = request
        self._engine = engine
        self._batches = batches
        self._change = change_of(request.variant)
        self._folder = Path(request.script).resolve().parent
        self._error: str | None = None
        self._notes: list[str] = []

    def run(self) -> None:
        """Run the script; what was found is written, however it ended."""
        self._engine.on_enough = self._write  # what the script does once it is told to end is its own affair
        signal.signal(signal.SIGALRM, _time_up)
        signal.setitimer(signal.ITIMER_REAL, self._request.time_limit, _AGAIN)
        try:
            with self._engine, self._batches, self._change, quiet_threads():
                source = None if self._request.batch is None else self._batches.source
                run_as_main(self._request.script, self._request.arguments, source=source or None)
        except BaseException as ending:  # noqa: BLE001  # whatever the script lets through
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._ended(ending)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self._engine.asked:  # else it is written, and what the script did since then does not count
            self._write()

    def _ended(self, ending: BaseException) -> None:
        if isinstance(ending, Enough):
            return
        made = f"after {self._engine.completed} of {self._request.steps} steps"
        if isinstance(ending, TimeUp):
            self._notes.append(f"the time limit of {self._request.time_limit:g} s ended the script {made}")
        elif isinstance(ending, Spinning):
            line = f"{Path(ending.place.file).name}:{ending.place.line}" if ending.place else "a line"
            self._notes.append(f"a loop at {line} waits for a value that only a real GPU could compute; ended {made}")
        elif isinstance(ending, SystemExit):
            if ending.code not in (None, 0):
                self._notes.append(f"the script ended itself with {ending.code!r} {made}")
        else:
            self._failed(ending)

    def _failed(self, error: BaseException) -> None:
        shown = shown_without(error, _OURS, _FAKE)
        self._error = "".join(shown.format())
        if isinstance(error, torch.OutOfMemoryError):
            own = [frame for frame in shown.stack if frame.filename.startswith(str(self._folder))] or shown.stack
            place = Place(own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else None
            self._engine.findings.add(
                "out-of-memory", str(error), "a smaller batch, bf16, checkpointing or accumulation", place
            )
            return
        sys.stdout.flush()
        print(self._error, end="", file=sys.stderr)

    def _write(self) -> None:
        if not self._engine.completed and self._error is None and not self._notes:
            self._notes.append("the script came to its end without a step of a torch.optim optimizer")
        batch = self._batches.to_batch()
        data = self._engine.result(self._folder, [*self._notes, *_batch_notes(batch, self._request.batch)]).to_json()
        changed = self._request.variant if self._change.made else None
        told = {"batch": batch.to_json(), "variant": changed, "error": self._error}
        write_json(Path(self._request.result), {**data, **told})


def _batch_notes(batch: Batch, asked: int | None) -> list[str]:
    """What was done to the batch, in sentences."""
    if asked is None or not batch.source:
        return []
    kind, _, name = batch.source.partition(":")
    through = {"argument": name, "variable": f"the variable {name}", "environment": f"the environment's {name}"}
    notes = [f"the batch is {asked}, set through {through.get(kind, f'the DataLoader of line {name}')}"]
    if batch.items is not None:
        notes.append(f"the data has {plural(batch.items, 'item')}, less than a batch: it was gone through again")
    return notes


def _time_up(_signal: int, _frame: Any) -> None:
    raise TimeUp
