"""`hotloop report`: what a person and a program get."""

import json
import shlex
from pathlib import Path

import pytest

from hotloop.report import runs as kept

from .conftest import Run

VERB = ("report",)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, rate in (("before", 100.0), ("after", 300.0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        entry = kept.Run(
            "train", "a net", f"2026-01-01T00:00:0{int(rate) // 100}+00:00", "cpu", {"items per second": rate}
        )
        (folder / "report.json").write_text(json.dumps(entry.to_json()))
    return tmp_path / "runs"


def test_before_the_first_run_it_says_what_makes_one(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    assert out == "no run is in runs yet: `hotloop train train.py:build` makes one\n"
    assert json.loads(run("--json").out) == {"runs": [], "failed": []}
    Path("runs").mkdir()
    assert "hotloop train train.py:build" in run().out


def test_without_words_it_lists_the_runs(run: Run, runs: Path) -> None:
    code, out, _ = run()
    assert code == 0
    assert out.index("after") < out.index("before")
    assert "hotloop report runs/before runs/after" in out
    code, out, _ = run("runs", "--json")
    assert [each["figures"]["items per second"] for each in json.loads(out)["runs"]] == [300.0, 100.0]


def test_the_command_that_compares_two_works_as_printed(run: Run, runs: Path) -> None:
    runs.rename(runs.parent / "my runs")
    _, out, _ = run("my runs")
    code, out, _ = run(*shlex.split(out.split("`")[1])[2:])
    assert code == 0
    assert "3.00×" in out


def test_two_are_compared_as_data(run: Run, runs: Path) -> None:
    assert json.loads(run("runs/before", "runs/after", "--json").out)["figures"] == {"items per second": [100.0, 300.0]}


def test_what_cannot_be_meant_is_told(run: Run, runs: Path) -> None:
    for args in (("nowhere",), ("runs/before", "nowhere"), ("runs", "runs", "runs")):
        run(*args).assert_told("hotloop: ")


def test_eighty_columns_show_folders_whole_and_what_is_left_out_in_lines(
    run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"2026-11-16_04-05-0{n}-with-a-name-that-is-rather-long" for n in range(2)]
    for before, name in zip(("before", "after"), names, strict=True):
        (runs / before).rename(runs / name)
    (runs / "broken").mkdir()
    (runs / "broken" / "report.json").write_text("no report")
    code, out, err = run()
    assert code == 0
    assert all(name in out for name in names)
    assert "\\n" not in err
    assert err.splitlines()[1:] == ["  fix: choose a folder that hotloop wrote"]
    code, out, _ = run(*(f"runs/{name}" for name in names))
    assert all(name in out for name in names)
    assert "3.00×" in out
