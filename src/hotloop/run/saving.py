"""`Saver`: when and where a run is saved, and the checkpoint that it resumes from."""

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from hotloop.checkpoint.codec import Packed
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.checkpoint.folders import FolderLock, InUse
from hotloop.checkpoint.reader import Checkpoint
from hotloop.checkpoint.shards import Team
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.writer import Writer
from hotloop.errors import BadArgument, OutputError
from hotloop.printing.text import printable
from hotloop.run.intervals import interval_in


class Saver:
    """Saves a run into a folder at an interval such as "5min" or "1000 steps".

    Of several ranks the first decides when, and writes. Others read what it has saved, contribute their part to what it
    saves, and with sharded tensors write their own rows.
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
        is_first: bool = True,
    ) -> None:
        self.every, self.folder, self._is_first = interval_in(every), Path(folder), is_first
        self.writer = Writer(Store(folder, keep, goal), team)
        self._lock: FolderLock | None = None
        if is_first:
            must_take_files(self.folder)
            self._lock = _locked(self.folder)
        try:
            self.found: Checkpoint | None = self.writer.store.load_latest(team)
            if self.found is not None and not resume:
                raise BadArgument(
                    f"{self.folder} holds the checkpoints of an earlier run, the last of step {self.found.step}",
                    fix="resume=True (`--resume`) continues from there; choose another folder for a new run",
                )
        except BaseException:
            self._release()
            raise
        self._accepted = None if self.found is None else self.found.step  # the step of the last checkpoint
        self._last_step, self._last_time = self._accepted or 0, time.monotonic()
        self.stall = 0.0  # seconds for which training was held up
        self._has_warned = False  # that something in a run cannot be saved

    @property
    def last(self) -> int | None:
        """The step of the last checkpoint; on the first rank, of the last that was written."""
        if not self._is_first:
            return self._accepted
        if self.writer.written is not None:
            return self.writer.written
        return None if self.found is None else self.found.step

    def read_best(self) -> dict[str, Any] | None:
        """What the best checkpoint holds; None where there is none."""
        found = self.writer.store.load_best(self.writer.team)
        return None if found is None else found.tree

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due; not before the last one is written."""
        if self.writer.busy or not self._is_first:
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
            part, is_accepted = tree(), True
            if self._is_first or self.writer.team is not None:
                is_accepted = self.writer.submit(step, part, score, wait=wait)
        except BadArgument as error:  # it was checked before the run, so something has come into it since
            is_accepted = False
            if self._is_first and not self._has_warned:
                self._has_warned = True
                warnings.warn(f"not saved at step {step}: {error}", CheckpointWarning, stacklevel=3)
        if is_accepted:
            self._accepted = step
        if is_accepted or not self.writer.busy:  # what failed is tried again when it is time for the next
            self._last_step, self._last_time = step, time.monotonic()
        if wait:
            self.writer.wait()
        self.stall += time.perf_counter() - began
        return is_accepted

    def check(self, tree: dict[str, Any]) -> None:
        """Raise for what a checkpoint cannot hold, before time is spent on training."""
        Packed(tree, takes_shards=self.writer.team is not None)

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
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


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
