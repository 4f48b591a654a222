"""Reading one checkpoint: everything in it is a claim until it was checked, and each byte is read once."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hotloop.checkpoint.errors import DamagedCheckpoint
from hotloop.checkpoint.folders import Summing, opened
from hotloop.checkpoint.sums import LONGEST, STATE, SUMS, TENSORS, Sum, Sums
from hotloop.checkpoint.tensorfile import CHUNK, read_tensors
from hotloop.checkpoint.tree import unpack
from hotloop.errors import BadArgument
from hotloop.text import printable

LARGEST_STATE = 1 << 28  # bytes of JSON; what is larger belongs into a tensor
ADVICE = "use another checkpoint; this one cannot be repaired"

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read."""

    step: int
    path: Path
    tree: Any
    score: float | None = None


def load(path: str | Path) -> Checkpoint:
    """Read the checkpoint in a folder; whatever is not exactly what was saved is an error that says why."""
    path = Path(path)
    if not path.is_dir():
        raise BadArgument(
            f"there is no checkpoint folder {printable(str(path))}",
            fix=f"name a folder that holds {TENSORS}, {STATE} and {SUMS}",
        )
    return read_checkpoint(path, read_sums(path))


def read_checkpoint(path: Path, sums: Sums) -> Checkpoint:
    """The content of a checkpoint whose sums were read already."""
    state = _checked(path, STATE, lambda: _read_state(path / STATE, sums.files[STATE]))
    tensors = _checked(path, TENSORS, lambda: _read_tensors(path / TENSORS, sums.files[TENSORS]))
    return Checkpoint(sums.step, path, _checked(path, STATE, lambda: unpack(tensors, state)), sums.score)


def read_sums(path: Path) -> Sums:
    """The sums of a checkpoint, without a look at what they vouch for."""

    def read() -> Sums:
        with opened(path / SUMS) as (file, length):
            if length > LONGEST:
                raise ValueError("it is far too long")
            return Sums.from_bytes(_whole(file, length))

    return _checked(path, SUMS, read)


def _checked(path: Path, name: str, read: Callable[[], T]) -> T:
    """What `read` gives; everything that can be wrong with a file becomes one kind of error, which names it."""
    try:
        return read()
    except FileNotFoundError as error:
        what = f"{name} is missing"
        raise DamagedCheckpoint(f"{printable(str(path))} is damaged: {what}", fix=ADVICE) from error
    except OSError as error:
        what = f"{name} cannot be read: {error.strerror or error}"
        raise DamagedCheckpoint(f"{printable(str(path))}: {what}", fix="see to it that you may read it") from error
    except (ValueError, RecursionError, MemoryError) as error:
        what = f"{name}: {printable(str(error)[:300]) or type(error).__name__}"
        raise DamagedCheckpoint(f"{printable(str(path))} is damaged: {what}", fix=ADVICE) from error


def _read_state(path: Path, expected: Sum) -> Any:
    with opened(path) as (file, length):
        _check_size(length, expected)
        if length > LARGEST_STATE:
            raise ValueError("it is far too long")
        content = _whole(file, length)
        _check_content(file, expected)
    return json.loads(content, parse_constant=_no_constant)


def _read_tensors(path: Path, expected: Sum) -> dict[str, Tensor]:
    with opened(path) as (file, length):
        _check_size(length, expected)
        try:
            tensors = read_tensors(file, length)
        except ValueError:
            rest = memoryview(bytearray(CHUNK))
            while file.readinto(rest):
                pass
            _check_content(file, expected)  # the likelier reason, and the more useful one
            raise
        _check_content(file, expected)
        return tensors


def _whole(file: Summing, length: int) -> bytes:
    content = bytearray(length)
    return bytes(content[: file.readinto(memoryview(content))])


def _check_size(length: int, expected: Sum) -> None:
    if length < expected.size:
        raise ValueError(f"it is cut short: {length} of {expected.size} bytes")
    if length > expected.size:
        raise ValueError(f"it is not the file that was written: {length} bytes instead of {expected.size}")


def _check_content(file: Summing, expected: Sum) -> None:
    if file.sum != expected:
        raise ValueError("its content has changed since it was written (the SHA-256 differs)")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
