"""Reading one checkpoint: everything in it is a claim until it was checked, and each byte is read once."""

import json
from collections.abc import Callable, Container, Iterator
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
    state = _checked(path, STATE, lambda: _read_state(path / STATE, sums.files[STATE]))
    tensors = _checked(path, TENSORS, lambda: _read_tensors(path / TENSORS, sums.files[TENSORS]))
    shards = _read_shards(path, sums, state, team)
    return Checkpoint(sums.step, path, _checked(path, STATE, lambda: unpack(tensors, state, shards)), sums.score)


def read_part(path: Path, sums: Sums, *keys: str) -> Any:
    """One part of the tree, by its keys from the root; None where it is not there. All files are verified.

    Of what else is in the checkpoint nothing is kept in memory.
    """
    state = _checked(path, STATE, lambda: _read_state(path / STATE, sums.files[STATE]))
    part = state
    for key in keys:
        if not isinstance(part, dict) or key not in part:
            return None
        part = part[key]
    names = set(_names_in(part))
    tensors = _checked(path, TENSORS, lambda: _read_tensors(path / TENSORS, sums.files[TENSORS], names))
    shards = _read_shards(path, sums, state, wanted=names)
    return _checked(path, STATE, lambda: unpack(tensors, part, shards))


def _names_in(data: Any) -> Iterator[str]:
    """Names of tensors that the JSON of a checkpoint mentions."""
    if isinstance(data, list):
        for each in data:
            yield from _names_in(each)
    elif isinstance(data, dict):
        yield from (str(data[tag]) for tag in ("$tensor", "$array", "$shard") if tag in data)
        for each in data.values():
            yield from _names_in(each)


def _read_shards(
    path: Path, sums: Sums, state: Any, team: Team | None = None, wanted: Container[str] | None = None
) -> dict[str, Tensor]:
    """What lies over the files of several ranks.

    Without a team all of it, and every file is verified. With one, a file that has no rows for this rank is read by
    another rank, and here only its size is compared.
    """
    if not sums.shards:
        return {}
    held = sum(sums.files[name].size for name in sums.shards)
    assembly = _checked(path, STATE, lambda: Assembly(dict(shards_in(state)), len(sums.shards), held, team, wanted))
    for rank, name in enumerate(sums.shards):
        read = partial(assembly.read, rank) if team is None or assembly.needs(rank) else None
        _checked(path, name, partial(_read_shard, path / name, sums.files[name], read))
    return assembly.tensors()


def _read_shard(path: Path, expected: Sum, read: Callable[[Summing, int], None] | None) -> None:
    with opened(path) as (file, length):
        _check_size(length, expected)
        if read is not None:
            _summed(file, expected, lambda: read(file, length))


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


def _read_state(path: Path, expected: Sum) -> Any:
    with opened(path) as (file, length):
        _check_size(length, expected)
        if length > LARGEST_STATE:
            raise ValueError("it is far too long")
        content = _whole(file, length)
        _check_content(file, expected)
    return json.loads(content, parse_constant=_no_constant)


def _read_tensors(path: Path, expected: Sum, wanted: Container[str] | None = None) -> dict[str, Tensor]:
    with opened(path) as (file, length):
        _check_size(length, expected)
        return _summed(file, expected, lambda: read_tensors(file, length, wanted))


def _summed(file: Summing, expected: Sum, read: Callable[[], T]) -> T:
    """What `read` gives of a file that is the one which was written."""
    try:
        got = read()
    except ValueError:
        rest = memoryview(bytearray(CHUNK))
        while file.readinto(rest):
            pass
        _check_content(file, expected)  # the likelier reason, and the more useful one
        raise
    _check_content(file, expected)
    return got


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
