"""`Saver`: when a run is saved, where, and what it goes on from."""

import re
import time
import warnings
from pathlib import Path
from typing import Any

from hotloop.checkpoint import Checkpoint, CheckpointWarning, Store, Writer
from hotloop.checkpoint.tree import pack
from hotloop.errors import BadArgument

_UNITS = {"": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "d": 86400}
_INTERVAL = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def seconds_in(words: str | float) -> float:
    """A length of time in words.

    >>> seconds_in("5min"), seconds_in("1.5 h"), seconds_in(20)
    (300.0, 5400.0, 20.0)
    """
    if isinstance(words, int | float) and not isinstance(words, bool):
        value = float(words)
    else:
        match = _INTERVAL.fullmatch(str(words))
        unit = _UNITS.get(match[2].lower().removesuffix("s")) if match else None
        if match is None or unit is None:
            raise BadArgument(f"{words!r} is no length of time", fix='give one such as "30s", "5min" or "2h"')
        value = float(match[1]) * unit
    if not value > 0:
        raise BadArgument(f"{words!r} is no length of time", fix="give more than 0")
    return value


class Saver:
    """Saves a run into a folder, every so often: after a time such as "5min", or after so many "steps"."""

    def __init__(self, folder: str | Path, every: str | float = "5min", *, keep: int = 3, resume: bool = False) -> None:
        self.steps: int | None = None
        self.seconds: float | None = None
        match = re.fullmatch(r"\s*(\d+)\s*steps?\s*", every) if isinstance(every, str) else None
        if match and int(match[1]):
            self.steps = int(match[1])
        else:
            self.seconds = seconds_in(every)
        self.folder = Path(folder)
        self.writer = Writer(Store(folder, keep=keep))
        self.found: Checkpoint | None = self.writer.store.load_latest()
        if self.found is not None and not resume:
            raise BadArgument(
                f"{self.folder} holds the checkpoints of an earlier run, the last of step {self.found.step}",
                fix="resume=True (`--resume`) goes on from there; choose another folder for a new run",
            )
        self._last_step = self.found.step if self.found is not None else 0
        self._last_time = time.monotonic()

    @property
    def last(self) -> int | None:
        """The step of the last checkpoint that is there."""
        return self.writer.written or (None if self.found is None else self.found.step)

    def is_due(self, step: int) -> bool:
        """Whether it is time for a checkpoint."""
        if self.steps is not None:
            return step - self._last_step >= self.steps
        assert self.seconds is not None
        return time.monotonic() - self._last_time >= self.seconds

    def save(self, step: int, tree: dict[str, Any], score: float | None = None, *, wait: bool = False) -> bool:
        """Save what a run is now; with `wait` it is on disk afterwards. Whether it was taken."""
        try:
            taken = self.writer.submit(step, tree, score, wait=wait)
        except BadArgument as error:  # it was checked before the run, so something has come into it since
            warnings.warn(f"not saved at step {step}: {error}", CheckpointWarning, stacklevel=2)
            return False
        if taken:
            self._last_step, self._last_time = step, time.monotonic()
        if wait:
            self.writer.wait()
        return taken

    def check(self, tree: dict[str, Any]) -> None:
        """Refuse what a checkpoint cannot hold, before the time to train it was spent."""
        pack(tree)

    def close(self) -> None:
        """Wait for what is being written."""
        self.writer.close()
