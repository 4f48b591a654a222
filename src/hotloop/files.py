"""Files that appear whole or not at all, and JSON that every program can read."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from hotloop.errors import OutputError
from hotloop.text import printable


def write_whole(path: Path, data: bytes) -> None:
    """Write a file through a temporary one beside it, so that it appears whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(
            f"cannot write {printable(str(path))}: {error.strerror or error}",
            fix="choose a place that you may write to, with enough space",
        ) from error


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write strict JSON, in which a number that is not finite is unknown: null."""
    write_whole(path, (json.dumps(finite(data), indent=1, allow_nan=False) + "\n").encode())


def finite(value: Any) -> Any:
    """The same data with None for every number that JSON cannot hold.

    >>> finite({"loss": float("nan"), "curve": (1, 2.5)})
    {'loss': None, 'curve': [1, 2.5]}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
