"""The benchmark of memory budgets runs, keeps its budgets, and writes what it found."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_it_runs_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("memory_budget")
    monkeypatch.setattr(benchmark, "TINY", replace(benchmark.TINY, layers=3, context=32))
    monkeypatch.setattr("sys.argv", ["memory_budget.py", "--quick", "--json", str(tmp_path / "r.json")])
    benchmark.main()
    assert "slowdown" in capsys.readouterr().out
    written = json.loads((tmp_path / "r.json").read_text())
    assert {"command", "date", "commit", "hardware", "versions", "rounds"} <= set(written)
    plain, *rows = written["rows"]
    assert plain["slowdown"] == 1
    assert plain["recompute"] == []
    for row in rows:
        assert row["missing"] == 0
        assert 0.8 * row["budget"] < row["peak"] <= row["budget"] < plain["peak"]
        assert row["recompute"]
        assert row["slowdown_low"] <= row["slowdown"] <= row["slowdown_high"]
