"""The runs on several ranks that this person has going: read from the files that their ranks write."""

import json
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hotloop.apps.top.cells import tame
from hotloop.monitor.reading import Reading
from hotloop.printing.text import duration
from hotloop.records import RankPace, Record, Report
from hotloop.records.cache import cache_folder, why_foreign

FOLDER = "ranks"  # where ranks write (hotloop.run.rank_file)
FILES, BYTES = 64, 2**17  # that are read, the newest first
STALE, OLD = 60.0, 86400.0  # seconds after which a file is of a run that was killed, and after which it is removed

_straggler: Callable[[Any], RankPace | None] = Report.straggler.fget  # type: ignore[attr-defined]  # the report's rule


@dataclass(frozen=True)
class RankState(RankPace):
    """What a rank has said of itself last."""

    pid: int = 0
    time: float = 0.0  # by its clock, seconds since 1970
    step: int = 0  # updates of the weights
    line: str = ""  # where in the person's code
    items_per_second: float | None = None  # of late; None: unknown
    waiting: float | None = None  # percent of an update in which it waits for others


@dataclass(frozen=True)
class RankRun(Record):
    """A run on several ranks, as far as it is known on this host."""

    run: str  # where its ranks meet
    program: str
    ranks: int  # of which those of this host are known
    by_rank: tuple[RankState, ...]
    straggler: int | None = None  # the rank for which the others wait

    @property
    def items_per_second(self) -> float | None:
        """Of all ranks; None where one is not known."""
        rates = [each.items_per_second for each in self.by_rank if each.items_per_second is not None]
        return sum(rates) if len(rates) == self.ranks else None

    @property
    def words(self) -> str:
        """For whom the others wait; nothing where all are as fast."""
        slow = next((each for each in self.by_rank if each.rank == self.straggler), None)
        others = sorted(each.own for each in self.by_rank if each.own is not None and each is not slow)
        if slow is None or slow.own is None or not others:
            return ""
        took = f"its part takes {duration(slow.own)}, theirs {duration(others[len(others) // 2])}"
        return f"the others wait for rank {slow.rank} on {tame(slow.host)}: {took}"


@dataclass(frozen=True)
class TopReading(Reading):
    """A reading, and the runs on several ranks at that moment."""

    runs: tuple[RankRun, ...] = ()


def with_runs(read: Callable[[], Reading], folder: Path | None = None) -> Callable[[], TopReading]:
    """The same readings, with the runs beside them."""

    def both() -> TopReading:
        reading = read()
        found = {field.name: getattr(reading, field.name) for field in fields(Reading)}
        return TopReading(**found, runs=runs_in(cache_folder(FOLDER) if folder is None else folder))

    return both


def runs_in(folder: Path) -> tuple[RankRun, ...]:
    """The runs whose ranks write to a folder, each rank its own file."""
    found: dict[str, RankRun] = {}
    for path in _newest(folder):
        run = _read(path)
        if run is None:
            continue
        before = found.get(run.run, run)
        latest = {each.rank: each for each in sorted([*before.by_rank, *run.by_rank], key=lambda each: each.time)}
        ranks = tuple(latest[rank] for rank in sorted(latest))
        found[run.run] = replace(run, by_rank=ranks)
    slow = {name: _straggler(run) for name, run in found.items()}
    return tuple(replace(found[name], straggler=s.rank if (s := slow[name]) else None) for name in sorted(found))


def _newest(folder: Path) -> list[Path]:
    """The files that runs have written of late: neither links nor pipes, and none that another person could write."""
    times = {}
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                found = path.lstat()
                is_ours = stat.S_ISREG(found.st_mode) and why_foreign(path) is None
                if path.suffix == ".json" and is_ours and found.st_size <= BYTES:
                    times[path] = found.st_mtime
    now = time.time()
    for path, then in times.items():
        if now - then > OLD:
            with suppress(OSError):
                path.unlink()
    fresh = [path for path, then in times.items() if abs(now - then) < STALE]
    return sorted(fresh, key=lambda path: -times[path])[:FILES]


def _read(path: Path) -> RankRun | None:
    """What a file holds; None where it is not what a run writes."""
    try:
        plain = json.loads(path.read_bytes())
        run = RankRun.from_json({**plain, "by_rank": [_state(each) for each in plain["words"]], "straggler": None})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    seen = {each.rank for each in run.by_rank}
    good = run.is_sound() and len(seen) == len(run.by_rank) > 0 and min(seen) >= 0 and max(seen) < run.ranks < 2**20
    return run if good else None


def _state(word: dict[str, Any]) -> dict[str, Any]:
    """A word of a rank as a state has it."""
    own, waited = word.get("own"), word.get("waited")
    share = None if own is None or waited is None or own + waited <= 0 else 100 * waited / (own + waited)
    return {**word, "waiting": share}
