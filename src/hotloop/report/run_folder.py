"""The folder of a run: new, or empty before; after an error it is as it was."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hotloop.errors import OutputError
from hotloop.printing.text import printable
from hotloop.records.files import cannot_write, finite, write_whole

RUNS = Path("runs")


class RunFolder:
    """A folder that is being filled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[Path] = []

    def write(self, name: str, content: str | bytes) -> None:
        """Write one file."""
        # A name of a file may hold bytes that are no text.
        data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
        self.written.append(self.path / name)
        write_whole(self.path / name, data, sync=False)

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """Write one file of strict JSON, in which a number that is not finite is unknown: null."""
        self.write(name, json.dumps(finite(data), indent=2, allow_nan=False) + "\n")


@contextmanager
def new_run(out: Path | None = None) -> Iterator[RunFolder]:
    """A new folder for a run: `out`, or `runs/` and the time. After an error, nothing of it is left.

    It is made before the block begins, so that a long run does not end in a folder that cannot be written.

    >>> with tempfile.TemporaryDirectory() as parent, new_run(Path(parent, "first")) as run:
    ...     run.write("hello.txt", "hello")
    """
    path = _unused(RUNS / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")) if out is None else out
    try:
        is_folder = path.is_dir()
        if os.path.lexists(path) and (not is_folder or any(path.iterdir())):
            raise OutputError(
                f"{printable(str(path))} {'is not empty' if is_folder else 'is there, and is no folder'}",
                fix="choose a new name; nothing that is there is overwritten",
            )
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=out is not None)
        tempfile.TemporaryFile(dir=path).close()
    except OutputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        raise cannot_write(path, error) from error
    run = RunFolder(path)
    try:
        yield run
    except BaseException:
        with suppress(OSError):  # something else may have used a folder since
            for file in run.written:
                file.unlink(missing_ok=True)
            for folder in missing:
                folder.rmdir()
        raise


def _unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, … that is not there: two runs may start in the same second."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
