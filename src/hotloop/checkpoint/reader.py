"""Reading one checkpoint: each file is hashed, then read."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotloop.checkpoint.codec import unpack
from hotloop.checkpoint.damage import DamagedCheckpoint
from hotloop.checkpoint.folders import opened
from hotloop.checkpoint.shards import Assembly, Team, shards_in
from hotloop.checkpoint.sums import LONGEST_FILE, STATE, SUMS, TENSORS, Sums
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
    tensors = _read(path, TENSORS, sums, _tensors_in)
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
    assembly = _checked(path, STATE, lambda: Assembly(shards_in(state), len(sums.shards), held, team))
    for rank, name in enumerate(sums.shards):
        _read(path, name, sums, partial(assembly.read, rank) if team is None or assembly.needs(rank) else None)
    return assembly.tensors()


def read_sums(path: Path) -> Sums:
    """The sums of a checkpoint, without a look at what they vouch for."""

    def read() -> Sums:
        with opened(path / SUMS) as (file, length):
            if length > LONGEST_FILE:
                raise ValueError("it is far too long")
            return Sums.from_bytes(file.read())

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
    except (ValueError, RecursionError, MemoryError, SafetensorError) as error:
        what = f"{name}: {printable(str(error)[:300]) or type(error).__name__}"
        raise DamagedCheckpoint(f"{printable(str(path))} is damaged: {what}", fix=ADVICE) from error


def _read(path: Path, name: str, sums: Sums, read: Callable[[Path], Any] | None) -> Any:
    """What `read` gives of a file that is the one which was written; without `read` only its size is compared."""

    def verified() -> Any:
        expected = sums.files[name]
        with opened(path / name) as (file, length):
            if length < expected.size:
                raise ValueError(f"it is cut short: {length} of {expected.size} bytes")
            if length > expected.size:
                raise ValueError(f"it is not the file that was written: {length} bytes instead of {expected.size}")
            if read is not None and hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise ValueError("its content has changed since it was written (the SHA-256 differs)")
        return None if read is None else read(path / name)

    return _checked(path, name, verified)


def _state_in(path: Path) -> Any:
    if path.stat().st_size > LARGEST_STATE:
        raise ValueError("it is far too long")
    return json.loads(path.read_bytes(), parse_constant=_no_constant)


def _tensors_in(path: Path) -> dict[str, Tensor]:
    # Copies: the file itself is mapped into memory, and whoever writes to it again would change them.
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # it is no dict


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
