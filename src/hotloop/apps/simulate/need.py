"""`Need`: memory that an operation takes for itself, besides its results."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

MOMENT, RESULT, PROCESS = "moment", "result", "process"  # how long memory is kept: see `Need`
TOGETHER = "together"  # with others that are held until the operation has run
STAGE = "stage"  # with others that are taken before the same result, and given back before it


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that an operation takes for itself."""

    bytes: int
    what: str
    lasting: str = MOMENT  # moment: until it has run; result: as long as what it saved; process: for ever, taken once
    key: str = ""  # of what is taken once; or a word below
    least: int | None = None  # what it makes do with where there is no room
    ahead: int | None = None  # taken before the result of this number, from 0; None: after all of them
    low: int | None = None  # bytes between which nine of ten like it lie, where these are not known for sure
    high: int | None = None
    doubt: str = ""  # why, in words

    @property
    def under(self) -> int:
        """Bytes that it may take less."""
        return 0 if self.low is None else max(0, self.bytes - self.low)

    @property
    def over(self) -> int:
        """Bytes that it may take more."""
        return 0 if self.high is None else max(0, self.high - self.bytes)


def together(found: Iterable[Need]) -> tuple[Need, ...]:
    """Needs of the same moment that are held at once."""
    return tuple(replace(need, key=TOGETHER) for need in found)
