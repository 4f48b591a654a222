"""Runs on several ranks: what their files tell, as far as they can be trusted, and how it is shown."""

import json
import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hotloop.apps.top.live import as_data
from hotloop.apps.top.ranks import BYTES, FOLDER, RankRun, RankState, TopReading, runs_in, with_runs
from hotloop.monitor.reading import Reading
from hotloop.run.rank_file import FOLDER as WRITTEN

from .pretend import NASTY, workstation
from .test_view import drawn


def word(rank: int, **changes: Any) -> dict[str, Any]:
    own, waited = (0.06, 0.003) if rank == 1 else (0.02, 0.04)
    said = {"rank": rank, "host": "node-a", "device": f"cuda:{rank}", "pid": 100 + rank, "time": time.time()}
    said |= {"step": 1650, "line": "train.py:57 in objective"}
    return {**said, "items_per_second": 617.25, "own": own, "waited": waited, **changes}


def told(*words: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"run": "node-a 100", "program": "train.py", "ranks": len(words), "words": list(words), **changes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / FOLDER
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    return folder


def write(folder: Path, data: Any, name: str = "100-abcd.json") -> Path:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    path.chmod(0o600)
    return path


def reading(*runs: RankRun) -> TopReading:
    base = workstation(3600)
    return TopReading(**{field.name: getattr(base, field.name) for field in fields(Reading)}, runs=runs)


def test_a_run_is_read_with_its_throughput_its_waiting_and_its_straggler(folder: Path) -> None:
    assert FOLDER == WRITTEN, "what ranks write is what is read"
    write(folder, told(word(0), word(1)))
    [run] = runs_in(folder)
    assert (run.ranks, run.program, run.straggler) == (2, "train.py", 1)
    assert run.items_per_second == pytest.approx(2 * 617.25)
    assert [round(each.waiting or 0) for each in run.by_rank] == [67, 5]
    data = as_data(with_runs(lambda: workstation(3600), folder)(), ())
    assert data["runs"][0]["straggler"] == 1
    assert data["runs"][0]["by_rank"][0]["items_per_second"] == 617.25


def test_files_of_several_hosts_are_one_run_and_the_latest_words_count(folder: Path) -> None:
    late = word(0, step=1, time=time.time() - 5)
    write(folder, told(word(0), ranks=3), "1-a.json")
    write(folder, told(late, word(2, host="node-b"), ranks=3), "2-b.json")
    write(folder, told(word(0), run="node-c 7"), "3-c.json")
    first, second = runs_in(folder)
    assert [(each.rank, each.step) for each in first.by_rank] == [(0, 1650), (2, 1650)]
    assert first.items_per_second is None, "one rank is not known"
    assert second.run == "node-c 7"


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{",
        '{"words": 3}',
        "[" * 100_000,
        told(),
        told(word(0), word(0)),
        told(word(5), ranks=2),
        told(word(-1), ranks=2),
        told(word(0), ranks=10**9),
        told(word(0, own="1")),
        told(word(0, time=None)),
        told(word(0, items_per_second=float("inf"))),
        told(word(0, host=["a"])),
        json.dumps(told(word(0))) + " " * BYTES,
    ],
    ids=lambda data: str(data)[:40],
)
def test_what_no_run_writes_is_left_out(data: Any, folder: Path) -> None:
    write(folder, data)
    write(folder, told(word(0), run="good"), "good.json")
    assert [run.run for run in runs_in(folder)] == ["good"]


def test_a_file_that_is_old_or_could_be_another_persons_is_left_out(folder: Path, tmp_path: Path) -> None:
    old = write(folder, told(word(0)), "old.json")
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    write(folder, told(word(0)), "open.json").chmod(0o666)
    elsewhere = write(tmp_path, told(word(0)), "elsewhere")
    (folder / "link.json").symlink_to(elsewhere)
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    write(folder, told(word(0)), "begun.new")
    assert runs_in(folder) == ()
    assert runs_in(tmp_path / "absent") == ()


def state(rank: int, **changes: Any) -> RankState:
    said = {**word(rank), "waiting": 5.0 if rank == 1 else 67.0, "time": workstation(3600).time, **changes}
    return RankState.from_json(said)


def run_of(ranks: int, **changes: Any) -> RankRun:
    return replace(RankRun("a", "train.py", ranks, tuple(state(n) for n in range(ranks)), 1), **changes)


def test_what_a_terminal_shows_of_ranks() -> None:
    text = drawn(reading(replace(run_of(2), ranks=8)), width=100)
    assert "8 ranks of train.py" in text
    assert "1,234 items/s" in drawn(reading(run_of(2)))
    assert "the others wait for rank 1 on node-a: its part takes 60 ms, theirs 20 ms" in text
    rows = [line for line in text.splitlines() if " node-a " in line and "cuda" in line]
    assert [row.split()[:8] for row in rows] == [
        ["!", "1", "node-a", "cuda:1", "1,650", "617", "5%", "train.py:57"],
        ["0", "node-a", "cuda:0", "1,650", "617", "67%", "train.py:57", "in"],
    ]
    assert "… and 6 more ranks" in text, "those of other hosts"
    assert "20416" in text, "processes are there as well"


def test_unknown_is_a_dash_and_a_silent_rank_is_told() -> None:
    silent = state(0, items_per_second=None, own=None, waited=None, waiting=None, time=workstation(3600).time - 42)
    text = drawn(reading(RankRun("a", "train.py", 2, (silent, state(1)))))
    [row] = [line for line in text.splitlines() if "silent for 42 s" in line]
    assert row.split()[4:6] == ["–", "–"]
    assert "the others wait" not in text


def test_words_of_ranks_steer_nothing() -> None:
    run = run_of(33, program=NASTY)
    drawn(reading(replace(run, by_rank=tuple(replace(each, host=NASTY, line=NASTY) for each in run.by_rank))))
