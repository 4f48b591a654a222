"""`Saver`: when and where a run is saved, and the checkpoint that it resumes from."""

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.checkpoint.folders import FolderLock, InUse
from hotloop.checkpoint.reader import Checkpoint, read_checkpoint, read_sums
from hotloop.checkpoint.shards import Team
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.tree import pack, pack_sharded
from hotloop.checkpoint.writer import Writer
from hotloop.errors import BadArgument, OutputError
from hotloop.printing.text import printable
from hotloop.training.intervals import interval_in


class Saver:
    """Saves a run into a folder at an interval such as "5min" or "1000 steps"."""

    def __init__(
        self,
        folder: str | Path,
        every: str | float = "5min",
        *,
        keep: int = 3,
        resume: bool = False,
        team: Team | None = None,
        goal: str | None = None,
    ) -> None:
        self.every = interval_in(every)
        self.folder = Path(folder)
        self.writer = Writer(Store(folder, keep, goal), team)
        must_take_files(self.folder)
        self._lock = _locked(self.folder)
        try:
            self.found: Checkpoint | None = self._look(resume=resume)
        except BaseException:
            self._lock.release()
            raise
        self._last_step = self.found.step if self.found is not None else 0
        self._last_time = time.monotonic()
        self.stall = 0.0  # seconds for which training was held up
        self._told = False  # that something in a run cannot be saved

    def _look(self, *, resume: bool) -> Checkpoint | None:
        """The checkpoint to resume from, if there is one."""
        found = self.writer.store.load_latest(self.writer.team)
        if found is not None and not resume:
            raise BadArgument(
                f"{self.folder} holds the checkpoints of an earlier run, the last of step {found.step}",
                fix="resume=True (`--resume`) continues from there; choose another folder for a new run",
            )
        return found

    @property
    def last(self) -> int | None:
        """The step of the last checkpoint."""
        if self.writer.written is not None:
            return self.writer.written
        return None if self.found is None else self.found.step

    def read_best(self) -> dict[str, Any] | None:
        """What the best checkpoint holds; None where there is none."""
        path = self.writer.store.best()
        return None if path is None else read_checkpoint(path, read_sums(path), self.writer.team).tree

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due; not before the last one is written."""
        if self.writer.busy:
            return False
        if self.every.steps is not None:
            return step - self._last_step >= self.every.steps
        assert self.every.seconds is not None
        return time.monotonic() - self._last_time >= self.every.seconds

    def save(
        self, step: int, tree: Callable[[], dict[str, Any]], score: float | None = None, *, wait: bool = False
    ) -> bool:
        """Save a checkpoint; with `wait` it is on disk afterwards. Returns whether it was accepted."""
        began = time.perf_counter()
        try:
            taken = self.writer.submit(step, tree(), score, wait=wait)
        except BadArgument as error:  # it was checked before the run, so something has come into it since
            taken = self._not_taken(step, error)
        if taken or not self.writer.busy:  # what failed is tried again when it is time for the next
            self._last_step, self._last_time = step, time.monotonic()
        if wait:
            self.writer.wait()
        self.stall += time.perf_counter() - began
        return taken

    def check(self, tree: dict[str, Any]) -> None:
        """Raise for what a checkpoint cannot hold, before time is spent on training."""
        pack(tree) if self.writer.team is None else pack_sharded(tree)

    def settle(self) -> None:
        """Wait until the checkpoint in progress is written."""
        self.writer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """The same, and release the folder for other runs.

        After a run that has `failed`, other ranks are not waited for.
        """
        try:
            self.writer.close(failed=failed)
        finally:
            self._lock.release()

    def _not_taken(self, step: int, error: Exception) -> bool:
        if not self._told:
            self._told = True
            warnings.warn(f"not saved at step {step}: {error}", CheckpointWarning, stacklevel=4)
        return False


class OtherRankSaver(Saver):
    """The saver of ranks other than 0: it reads what rank 0 has saved, and contributes its part to what that saves.

    With sharded tensors it writes its own rows.
    """

    def __init__(
        self,
        folder: str | Path,
        every: str | float = "5min",
        *,
        keep: int = 3,
        resume: bool = False,
        team: Team | None = None,
        goal: str | None = None,
    ) -> None:
        self.every, self.folder = interval_in(every), Path(folder)
        self.writer = Writer(Store(folder, keep, goal), team)
        self.found = self._look(resume=resume)
        self.stall = 0.0
        self._saved = None if self.found is None else self.found.step

    @property
    def last(self) -> int | None:
        return self._saved

    def is_due(self, step: int) -> bool:
        return False

    def save(
        self, step: int, tree: Callable[[], dict[str, Any]], score: float | None = None, *, wait: bool = False
    ) -> bool:
        began = time.perf_counter()
        part, taken = tree(), True
        if self.writer.team is not None:
            try:
                taken = self.writer.submit(step, part, score, wait=wait)
            except BadArgument:  # of which the first rank tells
                taken = False
            if wait:
                self.writer.wait()
        if taken:
            self._saved = step
        self.stall += time.perf_counter() - began
        return taken

    def close(self, *, failed: bool = False) -> None:
        self.writer.close(failed=failed)


def _locked(folder: Path) -> FolderLock:
    """Lock a folder; raises where another run saves into it, before anything in it is read or removed."""
    try:
        return FolderLock(folder)
    except InUse as error:
        raise BadArgument(
            f"another run saves into {printable(str(folder))}: {printable(str(error))}",
            fix="to resume from its checkpoints, wait for it or end it; choose another folder for a second run",
        ) from error


def must_take_files(folder: Path) -> None:
    """Make the folder where it is missing; raises where nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise OutputError(
            f"checkpoints cannot be written to {printable(str(folder))}: {error.strerror or error}",
            fix="choose a writable folder on a disk with free space",
        ) from error
