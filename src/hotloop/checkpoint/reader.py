"""Reading one checkpoint: everything in it is a claim until it was checked, and each byte is read once."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hotloop.checkpoint.damage import DamagedCheckpoint
from hotloop.checkpoint.folders import Summing, opened
from hotloop.checkpoint.shards import Assembly, Team, shards_in
from hotloop.checkpoint.sums import LONGEST_FILE, STATE, SUMS, TENSORS, Sum, Sums
from hotloop.checkpoint.tensorfile import CHUNK, read_tensors
from hotloop.checkpoint.tree import unpack
from hotloop.errors import BadArgument
from hotloop.printing.text import printable

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


def read_checkpoint(path: Path, sums: Sums, team: Team | None = None) -> Checkpoint:
    """The content of a checkpoint whose sums were read already; with a `team`, this rank's rows of what is sharded."""
    state = _read(path, STATE, sums, _state_in)
    tensors = _read(path, TENSORS, sums, read_tensors)
    shards = _read_shards(path, sums, state, team)
    return Checkpoint(sums.step, path, _checked(path, STATE, lambda: unpack(tensors, state, shards)), sums.score)


def _read_shards(path: Path, sums: Sums, state: Any, team: Team | None) -> dict[str, Tensor]:
    """What lies over the files of several ranks.

    Without a team all of it, and every file is verified. With one, a file that has no rows for this rank is read by
    another rank, and here only its size is compared.
    """
    if not sums.shards:
        return {}
    held = sum(sums.files[name].size for name in sums.shards)
    assembly = _checked(path, STATE, lambda: Assembly(dict(shards_in(state)), len(sums.shards), held, team))
    for rank, name in enumerate(sums.shards):
        _read(path, name, sums, partial(assembly.read, rank) if team is None or assembly.needs(rank) else None)
    return assembly.tensors()


def read_sums(path: Path) -> Sums:
    """The sums of a checkpoint, without a look at what they vouch for."""

    def read() -> Sums:
        with opened(path / SUMS) as (file, length):
            if length > LONGEST_FILE:
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
        raise DamagedCheckpoint(f"{printable(str(path))}: {what}", fix="check its permissions") from error
    except (ValueError, RecursionError, MemoryError) as error:
        what = f"{name}: {printable(str(error)[:300]) or type(error).__name__}"
        raise DamagedCheckpoint(f"{printable(str(path))} is damaged: {what}", fix=ADVICE) from error


def _read(path: Path, name: str, sums: Sums, read: Callable[[Summing, int], Any] | None) -> Any:
    """What `read` gives of a file that is the one which was written; without `read` only its size is compared."""
    expected = sums.files[name]

    def verified() -> Any:
        with opened(path / name) as (file, length):
            if length < expected.size:
                raise ValueError(f"it is cut short: {length} of {expected.size} bytes")
            if length > expected.size:
                raise ValueError(f"it is not the file that was written: {length} bytes instead of {expected.size}")
            if read is None:
                return None
            try:
                got = read(file, length)
            except ValueError:
                rest = memoryview(bytearray(CHUNK))
                while file.readinto(rest):
                    pass
                _check_content(file, expected)  # the likelier reason, and the more useful one
                raise
            _check_content(file, expected)
            return got

    return _checked(path, name, verified)


def _check_content(file: Summing, expected: Sum) -> None:
    if file.sum != expected:
        raise ValueError("its content has changed since it was written (the SHA-256 differs)")


def _state_in(file: Summing, length: int) -> Any:
    if length > LARGEST_STATE:
        raise ValueError("it is far too long")
    return json.loads(_whole(file, length), parse_constant=_no_constant)


def _whole(file: Summing, length: int) -> bytes:
    content = bytearray(length)
    return bytes(content[: file.readinto(memoryview(content))])


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
