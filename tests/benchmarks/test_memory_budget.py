"""The benchmark of memory budgets runs, keeps its budgets, and writes what it found."""

import json
from pathlib import Path

from ..warm import Warm

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_budget.py"


def test_it_runs_and_writes_what_it_found(tmp_path: Path, warm: Warm) -> None:
    ran = warm.run(BENCHMARK, "--quick", "--json", str(tmp_path / "r.json"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "slowdown" in ran.stdout
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
