"""Runs that were kept: listed, compared, and never trusted."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from hotloop.errors import BadArgument
from hotloop.report.runs import Run, compared, comparison, kept_in, read_run, runs_list, said
from hotloop.report.training_page import figures_of, headlines_of, run_of

from .reports import made_report


def shown(table: Table, width: int = 160) -> str:
    file = StringIO()
    Console(width=width, file=file, force_terminal=False, highlight=False).print(table)
    return file.getvalue()


def written(folder: Path, run: Run, data: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(run.with_data(data or {})))
    return folder


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    report = made_report()
    run = run_of(report, "a classifier")
    data = run.with_data(report.to_json())
    assert data["epochs"] == report.to_json()["epochs"], "the report.json has all of it"
    assert data["device"] == "Test CPU", "and what the entry says comes first"
    assert read_run(written(tmp_path / "a", run, report.to_json())).run == run
    assert run.figures["validation accuracy"] == pytest.approx(5 / 6)
    assert run.figures["items per second"] == 4000
    assert "peak memory in bytes" not in run.figures, "what is unknown is not 0"


def test_the_latest_run_comes_first_and_others_are_left_out(tmp_path: Path) -> None:
    for day in (1, 3, 2):
        written(
            tmp_path / f"run-{day}", Run("train", "net", f"2026-01-0{day}T00:00:00+00:00", "cpu", {"seconds": 60.0})
        )
    (tmp_path / "no-run").mkdir()
    written(tmp_path / "broken", Run("train", "x", "", "cpu"))
    (tmp_path / "broken" / "report.json").write_text("{")
    (tmp_path / "file").write_text("")
    runs, failed = kept_in(tmp_path)
    assert [kept.name for kept in runs] == ["run-3", "run-2", "run-1"]
    assert len(failed) == 1
    assert "broken" in failed[0]
    text = shown(runs_list(runs))
    assert text.index("run-3") < text.index("run-1")
    assert "1 min" in text


def test_a_folder_that_is_a_run_is_listed_itself(tmp_path: Path) -> None:
    runs, _ = kept_in(written(tmp_path / "only", Run("bench", "mlp", "2026-01-01", "cpu")))
    assert [kept.run.kind for kept in runs] == ["bench"]


def test_two_runs_side_by_side() -> None:
    first = Run("train", "net", "2026-01-01", "cpu", {"items per second": 100.0, "seconds": 60.0, "old": 1.0})
    second = Run("train", "net", "2026-01-02", "cpu", {"items per second": 250.0, "seconds": 24.0, "new": 2.0})
    rows = {name: (a, b, ratio, better) for name, a, b, ratio, better in compared(first, second)}
    assert rows["items per second"] == ("100", "250", "2.50×", True)
    assert rows["seconds"] == ("1 min", "24.00 s", "0.40×", True)
    assert rows["old"][1:] == ("–", "–", None)
    assert rows["new"][0] == "–"
    worse = {name: better for name, _, _, _, better in compared(second, first)}
    assert worse["items per second"] is False
    assert worse["seconds"] is False


@given(a=st.floats(allow_nan=False, allow_infinity=False), b=st.floats(allow_nan=False, allow_infinity=False))
def test_any_figures_can_be_compared(a: float, b: float) -> None:
    for name, less in (("seconds", True), ("validation accuracy", False), ("peak memory in bytes", True)):
        (row,) = compared(Run("a", "a", "", "", {name: a}), Run("b", "b", "", "", {name: b}))
        assert row[0] == name
        assert row[-1] is (None if a == b else (b < a) == less)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", "null", '{"kind": 1}', '{"kind": "a", "title": "b", "started": "c", "device": "d"}', "[" * 100_000],
)
def test_what_is_no_report_is_refused_in_words(tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(BadArgument, match="not the report of a run"):
        read_run(tmp_path)


def test_a_folder_without_a_report_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="cannot be read"):
        read_run(tmp_path)
    with pytest.raises(BadArgument, match="no folder"):
        kept_in(tmp_path / "nowhere")


def test_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    hostile = "\x1b[31m[bold]red"
    run = replace(Run("train", hostile, hostile, hostile, {hostile: 1.0, "n": float("nan")}))
    kept = read_run(written(tmp_path / "a\x1b[2J", run))
    assert "n" not in kept.run.figures
    for text in (shown(runs_list([kept])), shown(comparison(kept, kept))):
        assert "\x1b" not in text
        assert "[bold]red" in text


@pytest.mark.parametrize(("seconds", "told"), [(1.0, "995"), (20.0, "49.8")])
def test_one_rate_stands_for_a_training_everywhere(seconds: float, told: str) -> None:
    """Two epochs, of which the first warms up: the page said 995 items/s and the list of runs 1,699."""
    first, second, _ = made_report().epochs
    epochs = (replace(first, items=291, seconds=seconds), replace(second, items=1699, seconds=seconds))
    report = replace(made_report(), epochs=epochs)
    shown_there = next(fact.value for fact in headlines_of(report) if fact.label == "items per second")
    assert shown_there == said("items per second", figures_of(report)["items per second"]) == told
