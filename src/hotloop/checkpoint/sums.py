"""`Sums`: the small file that is written last and vouches for the others."""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Self

from hotloop.printing.text import printable
from hotloop.records import Record
from hotloop.version import __version__

FORMAT = "hotloop-checkpoint"
VERSION = 2
TENSORS = "tensors.safetensors"
STATE = "state.json"
SUMS = "sums.json"
LONGEST_FILE = 1 << 20  # bytes; a longer one is not ours
MOST_SHARDS = 1 << 12
SHARD = re.compile(r"rank-(\d{1,4})-of-(\d{1,4})\.safetensors", re.ASCII)


def shard_name(rank: int, size: int) -> str:
    """The file of one rank's shards."""
    return f"rank-{rank}-of-{size}.safetensors"


@dataclass(frozen=True)
class Sum(Record):
    """The size and the hash of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Sums(Record):
    """What a checkpoint is, and what its files must be."""

    step: int
    number: int  # counts the saves of a folder, so that the newest is known after a step was trained again
    score: float | None  # lower is better
    files: dict[str, Sum]
    goal: str | None = None  # what the score is of; None where nobody said

    @property
    def shards(self) -> list[str]:
        """The files that ranks have written, by rank."""
        size = min(len(self.files) - 2, MOST_SHARDS)
        return [shard_name(rank, size) for rank in range(size)]

    def to_bytes(self) -> bytes:
        about = {"format": FORMAT, "version": VERSION, "hotloop": __version__, **self.to_json()}
        return json.dumps({**about, "sha256": _own(about)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read what `to_bytes` wrote; anything else is a ValueError that says what it is."""
        try:
            about = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{SUMS} is not JSON") from error
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(f"{SUMS} was not written by hotloop")
        if about.get("version") != VERSION:
            written = printable(str(about.get("hotloop"))[:20])
            raise ValueError(
                f"its format is version {printable(str(about.get('version'))[:20])}, written by hotloop {written}; "
                f"this hotloop {__version__} reads version {VERSION}"
            )
        if about.pop("sha256", None) != _own(about):
            raise ValueError(f"{SUMS} does not hold what was written")
        try:
            sums = cls.from_json(about)
            is_sound = sums.is_sound() and sums.files.keys() == {TENSORS, STATE, *sums.shards}
        except (TypeError, ValueError, AttributeError, OverflowError):
            is_sound = False
        if not is_sound:
            raise ValueError(f"{SUMS} lacks what it should hold")
        return sums


def _own(about: dict[str, Any]) -> str:
    """The hash of the sums themselves: a flipped bit in the step or the score must show too."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
