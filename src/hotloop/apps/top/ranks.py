"""The runs on several ranks that this person has going: read from the files that their ranks write, and as lines."""

import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from hotloop.apps.top.bars import rule
from hotloop.apps.top.cells import UNKNOWN, age, cropped, known, left, number, percent, right, tame
from hotloop.files.cache import cache_folder, why_foreign
from hotloop.monitor.reading import Reading
from hotloop.printing.text import duration, plural
from hotloop.records import RankPace, Record, Report

FOLDER = "ranks"  # where ranks write (hotloop.training.rank_file)
FILES, BYTES = 64, 2**17  # that are read, the newest first
LONGEST_WORDS = 200  # characters of a foreign string
STALE, OLD = 60.0, 86400.0  # seconds after which a file is of a run that was killed, and after which it is removed
SILENT = 10.0  # seconds after which it is told how old a word is; ranks say one every two
NARROW, NARROWER = 70, 50  # terminals that have no room for the device, and for the step
BADGE = "bold black on yellow"

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
    """The files that runs have written of late."""
    times = {}
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if path.suffix == ".json":
                    times[path] = path.stat(follow_symlinks=False).st_mtime
    now = time.time()
    for path, then in times.items():
        with suppress(OSError):
            if now - then > OLD and why_foreign(path) is None:
                path.unlink()
    fresh = [path for path, then in times.items() if abs(now - then) < STALE and why_foreign(path) is None]
    return sorted(fresh, key=lambda path: -times[path])[:FILES]


def _read(path: Path) -> RankRun | None:
    """What a file holds; None where it is not what a run writes."""
    try:
        # Neither a link nor a pipe, which would have to be waited for.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            data = file.read(BYTES + 1)
        if len(data) > BYTES:
            return None
        plain = json.loads(data)
        run = RankRun.from_json({**plain, "by_rank": [_state(each) for each in plain["words"]], "straggler": None})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    seen = {each.rank for each in run.by_rank}
    good = run.is_sound() and len(seen) == len(run.by_rank) > 0 and min(seen) >= 0 and max(seen) < run.ranks < 2**20
    texts = [
        run.run,
        run.program,
        *(t for each in run.by_rank for t in (each.host, each.device, each.line)),
    ]
    return run if good and max(map(len, texts)) <= LONGEST_WORDS else None


def _state(word: dict[str, Any]) -> dict[str, Any]:
    """A word of a rank as a state has it."""
    own, waited = word.get("own"), word.get("waited")
    share = None if own is None or waited is None or own + waited <= 0 else 100 * waited / (own + waited)
    return {**word, "waiting": share}


def table(reading: Reading, width: int, lines: int | None) -> list[Text]:
    """The ranks of all runs, in at most so many lines; nothing where there are none."""
    runs = reading.runs if isinstance(reading, TopReading) else ()
    drawn: list[Text] = []
    for place, run in enumerate(runs):
        room = None if lines is None else (lines - len(drawn)) // (len(runs) - place)
        drawn += _block(run, reading.time, width, room)
    return drawn


def _block(run: RankRun, now: float, width: int, room: int | None) -> list[Text]:
    """A run: for whom the others wait, and its ranks, that one first."""
    name = f"{plural(run.ranks, 'rank')} of {tame(run.program)}"
    head = rule(name, width, f"{number(run.items_per_second)} items/s" if known(run.items_per_second) else "")
    told = [cropped(Text.assemble((" ! ", BADGE), " ", (run.words, "bold")), width)] if run.words else []
    if room is not None and room < len(told) + 4:
        return [head, *told][: max(room, 0)]
    shown, unknown = list(run.by_rank), run.ranks - len(run.by_rank)
    if room is not None and len(told) + 2 + len(shown) + (unknown > 0) > room:
        shown = sorted(shown, key=lambda each: each.rank != run.straggler)[: room - len(told) - 3]
    lines = [head, *told, *_rows(run, shown, now, width)]
    if missing := run.ranks - len(shown):
        lines.append(cropped(Text(f"  … and {plural(missing, 'more rank')}", style="dim"), width))
    return lines


def _rows(run: RankRun, ranks: Sequence[RankState], now: float, width: int) -> Iterator[Text]:
    """The titles, and a line for each rank."""
    hosts = min(max(len(tame(each.host)) for each in run.by_rank), 16)
    columns: list[tuple[str, int, Callable[[str, int], str], Callable[[RankState], str]]] = [
        ("rank", max(4, len(str(run.ranks))), right, lambda each: str(each.rank)),
        ("host", max(4, hosts), left, lambda each: tame(each.host)),
    ]
    if width >= NARROW:
        columns.append(("device", 6, left, lambda each: tame(each.device)))
    if width >= NARROWER:
        columns.append(("step", 8, right, lambda each: number(each.step)))
    columns += [
        ("items/s", 9, right, lambda each: _rate(each.items_per_second)),
        ("waits", 5, right, lambda each: percent(each.waiting)),
    ]
    taken = 2 + sum(cells + 1 for _, cells, _, _ in columns)
    columns.append(("line", max(width - taken, 0), left, lambda each: _where(each, now)))
    titles = " ".join(put(title, cells) for title, cells, put, _ in columns)
    yield cropped(Text("  " + titles, style="dim"), width)
    for each in ranks:
        is_slow = each.rank == run.straggler
        line = " ".join(put(say(each), cells) for _, cells, put, say in columns)
        yield cropped(Text(f"{'!' if is_slow else ' '} {line}", style="bold yellow" if is_slow else ""), width)


def _where(each: RankState, now: float) -> str:
    silent = now - each.time
    return f"silent for {age(silent)}" if silent > SILENT else tame(each.line)


def _rate(value: float | None) -> str:
    rate = known(value)
    return UNKNOWN if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
