"""The benchmark of memory budgets runs, keeps its budgets, and writes what it found."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_budget.py"


def test_it_runs_and_writes_what_it_found(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(tmp_path / "r.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
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
