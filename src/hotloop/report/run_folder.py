"""The folder of a run: put together out of sight, and given its name only when everything in it was written."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hotloop.errors import OutputError
from hotloop.files.whole import finite
from hotloop.printing.text import printable

RUNS = Path("runs")
INNER = "run"  # inside the workshop, which mkdtemp makes for its owner alone; this one follows the umask
ADVICE = {
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder on a disk that can be written to",
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EDQUOT: "free some of your quota, or choose a folder on another disk",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of this path is a file; choose a path of folders",
}


class RunFolder:
    """A folder that is being filled. `path` is the name that it will have."""

    def __init__(self, path: Path, now: Path) -> None:
        self.path = path
        self._now = now  # where it is until then

    def write(self, name: str, content: str | bytes) -> None:
        """Write one file."""
        # A name of a file may hold bytes that are no text.
        data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
        try:
            (self._now / name).write_bytes(data)
        except OSError as error:
            raise _cannot_write(self.path / name, error) from error

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """Write one file of strict JSON, in which a number that is not finite is unknown: null."""
        self.write(name, json.dumps(finite(data), indent=2, allow_nan=False) + "\n")


@contextmanager
def new_run(out: Path | None = None) -> Iterator[RunFolder]:
    """A new folder for a run: `out`, or `runs/` and the time. It appears when the block ends; after an error, never.

    The place is tried before the block begins, so that a long run does not end in a folder that cannot be written.

    >>> with tempfile.TemporaryDirectory() as parent, new_run(Path(parent, "first")) as run:
    ...     run.write("hello.txt", "hello")
    """
    made: list[Path] = []
    workshop: Path | None = None
    path = _unused(RUNS / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")) if out is None else out
    try:
        with _explained(path):
            exists = _exists_and_is_empty(path)
            if not exists:
                _make_parents(path, made)
            # An empty folder that is there already may be a mount or the place where a shell stands: it stays the
            # same folder, and is filled from a workshop inside it.
            workshop = Path(tempfile.mkdtemp(prefix=".hotloop-", dir=path if exists else path.parent))
            (workshop / INNER).mkdir()
        yield RunFolder(path, workshop / INNER)
        with _explained(path):
            _fill(path, workshop) if exists else _publish(path, workshop)
    except BaseException:
        _clean_up(workshop, made)
        raise


def _unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, … that is not there: two runs may start in the same second."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _exists_and_is_empty(path: Path) -> bool:
    """Whether the folder is there; it must then be empty."""
    try:
        if next(path.iterdir(), None) is None:
            return True
    except FileNotFoundError:
        if not path.is_symlink():
            return False
        raise OutputError(
            f"cannot write {_shown(path)}: it is a link to nowhere", fix="remove the link, or choose another name"
        ) from None
    except NotADirectoryError:
        if not path.exists():
            raise
        raise OutputError(
            f"cannot write the folder {_shown(path)}: a file has that name", fix="choose another name"
        ) from None
    raise OutputError(
        f"the folder {_shown(path)} is not empty", fix="choose a new name; nothing that is there is overwritten"
    )


def _make_parents(path: Path, made: list[Path]) -> None:
    """Make the folders above `path`, and note each one, so that a failed run takes them away again."""
    missing = [parent for parent in path.parents if not parent.exists()]
    for parent in reversed(missing):
        with suppress(FileExistsError):  # another run made it just now
            parent.mkdir()
            made.append(parent)


def _publish(path: Path, workshop: Path) -> None:
    """Give the finished folder its name."""
    (workshop / INNER).rename(path)
    workshop.rmdir()


def _fill(path: Path, workshop: Path) -> None:
    """Move the finished files up into the folder that was there."""
    moved: list[Path] = []
    try:
        for file in sorted((workshop / INNER).iterdir()):
            moved.append(file.rename(path / file.name))
        shutil.rmtree(workshop)
    except BaseException:
        for file in moved:
            file.unlink()
        raise


def _clean_up(workshop: Path | None, made: list[Path]) -> None:
    """Leave nothing; a folder that something else has used since stays."""
    if workshop is not None:
        shutil.rmtree(workshop, ignore_errors=True)
    for parent in reversed(made):
        with suppress(OSError):
            parent.rmdir()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the disk, with the path, the reason and what to do."""
    try:
        yield
    except OutputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError | ValueError) -> OutputError:
    number = error.errno if isinstance(error, OSError) else None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    advice = ADVICE.get(number or 0, "choose another folder")
    return OutputError(f"cannot write {_shown(path)}: {reason}", fix=f"{advice}, for example with --out")


def _shown(path: Path) -> str:
    return printable(str(path))
