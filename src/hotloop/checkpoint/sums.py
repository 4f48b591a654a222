"""`Sums`: the small file that is written last and vouches for the others."""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from hotloop.printing.text import printable
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
class Sum:
    """The size and the hash of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Sums:
    """What a checkpoint is, and what its files must be."""

    step: int
    number: int  # counts the saves of a folder, so that the newest is known after a step was trained again
    score: float | None  # lower is better; never nan
    files: dict[str, Sum]
    goal: str | None = None  # what the score is of; None where nobody said

    @property
    def shards(self) -> list[str]:
        """The files that ranks have written, by rank."""
        size = len(self.files) - 2
        return [shard_name(rank, size) for rank in range(size)]

    def to_bytes(self) -> bytes:
        score = str(self.score) if self.score in (math.inf, -math.inf) else self.score  # JSON has no infinity
        about: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "hotloop": __version__,
            "step": self.step,
            "number": self.number,
            "score": score,
            "goal": self.goal,
            "files": {name: {"size": each.size, "sha256": each.sha256} for name, each in self.files.items()},
        }
        return json.dumps({**about, "sha256": _own(about)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Sums":
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
            return cls._of(about)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"{SUMS} lacks what it should hold") from error

    @classmethod
    def _of(cls, about: dict[str, Any]) -> "Sums":
        files = {name: Sum(_count(each["size"]), str(each["sha256"])) for name, each in about["files"].items()}
        size = len(files) - 2
        shards = [shard_name(rank, size) for rank in range(min(size, MOST_SHARDS))]
        if files.keys() != {TENSORS, STATE, *shards}:
            raise ValueError("it names other files")
        score = None if about["score"] is None else float(about["score"])
        if score is not None and math.isnan(score):
            raise ValueError("a score is a number")
        if (goal := about["goal"]) is not None and not isinstance(goal, str):
            raise ValueError("a goal is a name")
        return cls(_count(about["step"]), _count(about["number"]), score, files, goal)


def _own(about: dict[str, Any]) -> str:
    """The hash of the sums themselves: a flipped bit in the step or the score must show too."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a count was expected")
    return value
