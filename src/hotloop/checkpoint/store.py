"""`Store`: a folder of checkpoints. Each one is there whole or not at all, and is verified when it is read."""

import json
import math
import operator
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.checkpoint import folders
from hotloop.checkpoint.codec import pack
from hotloop.checkpoint.damage import CheckpointWarning, DamagedCheckpoint
from hotloop.checkpoint.reader import LARGEST_STATE, Checkpoint, read_checkpoint, read_sums
from hotloop.checkpoint.shards import Team
from hotloop.checkpoint.sums import STATE, SUMS, TENSORS, Sum, Sums
from hotloop.checkpoint.tensorfile import HostSource, Source, write_tensors
from hotloop.errors import BadArgument, OutputError
from hotloop.printing.text import printable, shorten, size

_SAVING = ".saving-"  # being written, by the one run that holds the folder's lock
_REMOVING = ".removing-"  # on its way out
_ASIDE = ".aside-"  # made way for a new checkpoint of the same step
_NAME = re.compile(rf"(?:{re.escape(_ASIDE)})?step-(\d{{9,19}})", re.ASCII)


@dataclass(frozen=True)
class _Listed:
    """A checkpoint in the folder, of which only the sums were read."""

    path: Path
    step: int
    sums: Sums | None  # None where they cannot be read
    problem: str = ""

    @property
    def order(self) -> tuple[int, int]:
        return (self.sums.number if self.sums else 0, self.step)


class Store:
    """Checkpoints in a folder: the last few, and the best.

        store = Store("runs/sprites")
        store.save(100, {"model": model.state_dict()}, score=0.31)
        model.load_state_dict(store.load_latest().tree["model"])

    A process that is killed while it saves leaves the checkpoints of before. `keep` is how many of the last ones stay.
    `goal` names what its scores are of; the best is looked for among those of the goal that the newest score has.
    """

    def __init__(self, folder: str | Path, keep: int = 3, goal: str | None = None) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise BadArgument(f"keep is {keep!r}", fix="give the number of checkpoints to keep, 1 or more")
        self.folder = Path(folder)
        self.keep = keep
        self.goal = goal

    def save(self, step: int, tree: Any, *, score: float | None = None) -> Path:
        """Write a checkpoint and return its folder. A lower `score` is better; the best checkpoint is kept too."""
        tensors, state = pack(tree)
        return self.write(step, [HostSource(tensors)], state, score=score)

    def write(self, step: int, sources: Sequence[Source], state: Any, *, score: float | None = None) -> Path:
        """The same for a tree that `pack` took apart, with tensors that may still be on their way to the host."""
        with self.begin(step) as making:
            return self.finish(making, step, sources, state, score=score)

    @contextmanager
    def begin(self, step: int) -> Iterator[Path]:
        """A folder for a checkpoint that is being made, which nobody takes for one; what is left of it is removed."""
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                folders.sync_folder(self.folder.parent)
            self._clear()
            making = self.folder / f"{_SAVING}{os.urandom(4).hex()}"
            making.mkdir()
            try:
                yield making
            finally:
                folders.remove(making)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(
                f"cannot save the checkpoint of step {step} in {_shown(self.folder)}: {error.strerror or error}",
                fix="free space there, or choose a writable folder; earlier checkpoints are untouched",
            ) from error

    def finish(
        self,
        making: Path,
        step: int,
        sources: Sequence[Source],
        state: Any,
        *,
        score: float | None = None,
        others: Callable[[], Mapping[str, Sum]] = dict,
    ) -> Path:
        """Write what is whole into a folder that was begun, and give it its name.

        `others` waits for the files of all ranks.
        """
        score = as_score(score)
        content = json.dumps(state, allow_nan=False, separators=(",", ":")).encode()
        if len(content) > LARGEST_STATE:
            raise BadArgument(
                f"a checkpoint cannot hold {size(len(content))} of lists and numbers besides tensors",
                fix=f"put long lists into tensors; {size(LARGEST_STATE)} are possible",
            )
        number = 1 + max((each.sums.number for each in self._found() if each.sums), default=0)
        final = self.folder / f"step-{step:09d}"
        with folders.written(making / TENSORS) as tensors:
            write_tensors(tensors, sources)
        with folders.written(making / STATE) as rest:
            rest.write(content)
        sums = Sums(step, number, score, {TENSORS: tensors.sum, STATE: rest.sum, **others()}, self.goal)
        with folders.written(making / SUMS) as last:
            last.write(sums.to_bytes())
        folders.sync_folder(making)
        self._put(making, final)
        folders.sync_folder(self.folder)
        self._prune(final)
        return final

    def load_latest(self, team: Team | None = None) -> Checkpoint | None:
        """The newest checkpoint that is sound; each newer one that is not is named in a `CheckpointWarning`.

        None means that there is no checkpoint at all. Some, but no sound one, is an error. The ranks of a `team` each
        read their rows of what is sharded, and one that is not sound for any of them is so for all.
        """
        found = sorted(self._found(), key=operator.attrgetter("order"), reverse=True)
        if team is not None:  # all ranks look at what the first has found, in one order
            named = team.gather([(each.path.name, each.step) for each in found])[0]
            found = [_look(self.folder / name, step) for name, step in named]
        refused: dict[Path, str] = {}  # newer ones, and what is wrong with them
        for each in found:
            loaded, problem = None, each.problem or None
            try:
                if each.sums is not None:
                    loaded = read_checkpoint(each.path, each.sums, team)
            except DamagedCheckpoint as error:
                problem = error.what
            if team is not None:
                problem = team.first_problem(problem)
            if problem is None and loaded is not None:
                refused |= {bad.path: bad.problem for bad in found if bad.sums is None and bad.step > each.step}
                for what in refused.values():
                    warnings.warn(CheckpointWarning(f"{what}; {loaded.path.name} is used instead"), stacklevel=2)
                return loaded
            refused[each.path] = problem or ""
        if found:
            raise DamagedCheckpoint(
                f"no checkpoint can be used: {shorten([*refused.values()], limit=4)}",
                fix=f"restore an intact copy to {_shown(self.folder)}, or start over in another folder",
            )
        return None

    def best(self) -> Path | None:
        """The folder of the checkpoint with the lowest score, where any has one."""
        best = _best(self._found())
        return best.path if best else None

    def load_best(self, team: Team | None = None) -> Checkpoint | None:
        """That checkpoint, read."""
        path = self.best()
        return None if path is None else read_checkpoint(path, read_sums(path), team)

    def _put(self, made: Path, final: Path) -> None:
        """Give a finished checkpoint its name. One that has the name already can be found until that is done."""
        if not os.path.lexists(final):
            made.rename(final)
            return
        aside = final.with_name(f"{_ASIDE}{final.name}")
        final.rename(aside)
        made.rename(final)
        self._discard(aside)

    def _clear(self) -> None:
        """Remove what killed saves have left, and undo a replacement that was cut in two."""
        for entry in list(self.folder.iterdir()):
            if entry.name.startswith((_SAVING, _REMOVING)):
                folders.remove(entry)
            elif entry.name.startswith(_ASIDE) and _NAME.fullmatch(entry.name):
                whole = entry.with_name(entry.name.removeprefix(_ASIDE))
                if os.path.lexists(whole):
                    self._discard(entry)
                else:
                    entry.rename(whole)

    def _prune(self, newest: Path) -> None:
        """Remove what is neither among the last nor the best. What is damaged or not ours is left to the person."""
        found = sorted((each for each in self._found() if each.sums), key=operator.attrgetter("order"))
        best = _best(found)
        kept = {newest, *(each.path for each in found[-self.keep :]), *([best.path] if best else [])}
        for each in found:
            if each.path not in kept:
                self._discard(each.path)

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint. It loses its name first, so that half of one is never seen."""
        gone = path.with_name(f"{_REMOVING}{path.name}-{os.urandom(4).hex()}")
        try:
            path.rename(gone)
        except OSError:
            return  # there is one too many, and the next save tries again
        folders.remove(gone)

    def _found(self) -> list[_Listed]:
        try:
            entries = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadArgument(
                f"cannot look for checkpoints in {_shown(self.folder)}: {error.strerror or error}",
                fix="name a readable folder",
            ) from error
        return [_look(entry, int(match[1])) for entry in entries if (match := _NAME.fullmatch(entry.name))]


def as_score(score: float | None) -> float | None:
    """A score as a plain number; one that is not finite counts as none, so it is never the best."""
    return None if score is None or not math.isfinite(score) else float(score)


def _look(path: Path, step: int) -> _Listed:
    try:
        if path.is_symlink():
            raise DamagedCheckpoint(f"{_shown(path)} is a link to another place, and is not followed")
        sums = read_sums(path)
        if sums.step != step:
            raise DamagedCheckpoint(f"{_shown(path)} is not what its name says: it holds step {sums.step}")
    except DamagedCheckpoint as error:
        return _Listed(path, step, None, error.what)
    return _Listed(path, step, sums)


def _best(found: Sequence[_Listed]) -> _Listed | None:
    """The lowest score of the newest goal; among equals the one that was there first."""
    scored = [
        (each.sums.score, each.order, each.sums.goal, each)
        for each in found
        if each.sums and each.sums.score is not None
    ]
    if not scored:
        return None
    newest = max(scored, key=operator.itemgetter(1))[2]
    return min((each for each in scored if each[2] == newest), key=operator.itemgetter(0, 1))[3]


def _shown(path: Path) -> str:
    return printable(str(path))
