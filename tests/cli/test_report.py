"""`hotloop report`: what a person and a program get."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from hotloop.cli import main
from hotloop.report.runs import Run


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*args: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["hotloop", "report", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, rate in (("before", 100.0), ("after", 300.0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        run = Run("train", "a net", f"2026-01-01T00:00:0{int(rate) // 100}+00:00", "cpu", {"items per second": rate})
        (folder / "report.json").write_text(json.dumps(run.to_json()))
    return tmp_path / "runs"


def test_before_the_first_run_it_says_what_makes_one(call) -> None:
    code, out, _ = call()
    assert code == 0
    assert out == "no run is in runs yet: `hotloop train train.py:build` makes one\n"
    assert json.loads(call("--json")[1]) == {"runs": [], "failed": []}


def test_without_words_it_lists_the_runs(call, runs: Path) -> None:
    code, out, _ = call()
    assert code == 0
    assert out.index("after") < out.index("before")
    assert "hotloop report runs/before runs/after" in out
    code, out, _ = call("runs", "--json")
    assert [run["figures"]["items per second"] for run in json.loads(out)["runs"]] == [300.0, 100.0]


def test_the_command_that_compares_two_works_as_printed(call, runs: Path) -> None:
    runs.rename(runs.parent / "my runs")
    _, out, _ = call("my runs")
    code, out, _ = call(*shlex.split(out.split("`")[1])[2:])
    assert code == 0
    assert "3.00×" in out


def test_two_are_compared(call, runs: Path) -> None:
    code, out, _ = call("runs/before", "runs/after")
    assert code == 0
    assert "3.00×" in out
    code, out, _ = call("runs/before", "runs/after", "--json")
    assert json.loads(out)["figures"] == {"items per second": [100.0, 300.0]}


def test_what_cannot_be_meant_is_told(call, runs: Path) -> None:
    for args in (("nowhere",), ("runs/before", "nowhere"), ("runs", "runs", "runs")):
        code, _, err = call(*args)
        assert code == 2
        assert "fix:" in err
        assert "Traceback" not in err


def test_an_empty_folder_says_how_to_make_a_run(call, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    code, out, _ = call()
    assert code == 0
    assert "hotloop train train.py:build" in out


def test_eighty_columns_show_folders_whole_and_what_is_left_out_in_lines(
    call, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"2026-11-16_04-05-0{n}-with-a-name-that-is-rather-long" for n in range(2)]
    for before, name in zip(("before", "after"), names, strict=True):
        (runs / before).rename(runs / name)
    (runs / "broken").mkdir()
    (runs / "broken" / "report.json").write_text("no report")
    code, out, err = call()
    assert code == 0
    assert all(name in out for name in names)
    assert "\\n" not in err
    assert err.splitlines()[1:] == ["  fix: choose a folder that hotloop wrote"]
    code, out, _ = call(*(f"runs/{name}" for name in names))
    assert all(name in out for name in names)
    assert "3.00×" in out
