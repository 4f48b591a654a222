"""Files that appear whole or not at all, and JSON that every program can read."""

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from hotloop.errors import OutputError
from hotloop.printing.text import printable


def cannot_write(path: Path, error: Exception) -> OutputError:
    """The error for a file or folder that cannot be written."""
    why = getattr(error, "strerror", None) or error
    return OutputError(f"cannot write {printable(str(path))}: {why}", fix="choose a writable folder with enough space")


@contextmanager
def whole(path: Path, *, mode: int = 0o666, sync: bool = True) -> Iterator[IO[bytes]]:
    """A file that is written through a temporary one beside it, so that it appears whole or not at all.

    With `sync` that holds where the machine fails, too; it may take seconds on a busy disk. `mode` is lessened by the
    umask, which the system does as it makes the file: to read the umask one must change it, and files that other
    threads make meanwhile would get the wrong one.
    """
    temporary = path.parent / f".{path.name[:40]}-{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "a device or a pipe"  # which root could replace, such as /dev/null
            raise FileExistsError(errno.EEXIST, f"it is {what}")
        try:
            with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error) from error


def write_whole(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = True) -> None:
    """Write a file that appears whole or not at all."""
    with whole(path, mode=mode, sync=sync) as file:
        file.write(data)


def write_json(path: Path, data: dict[str, Any], *, mode: int = 0o666, sync: bool = True) -> None:
    """Write strict JSON, in which a number that is not finite is unknown: null."""
    write_whole(path, (json.dumps(finite(data), indent=1, allow_nan=False) + "\n").encode(), mode=mode, sync=sync)


def finite(value: Any) -> Any:
    """The same data with None for every number that JSON cannot hold.

    >>> finite({"loss": float("nan"), "curve": (1, 2.5)})
    {'loss': None, 'curve': [1, 2.5]}
    """
    return json.loads(json.dumps(value), parse_constant=lambda _: None)  # NaN and the infinities
