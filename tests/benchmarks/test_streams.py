"""The benchmark of the streams runs and writes what it found."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "streams.py"


def test_it_runs_and_writes_what_it_found(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--repeats", "1", "--json", str(tmp_path / "r.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads((tmp_path / "r.json").read_text())["items_per_second"]
    assert set(figures) == {"mlp", "small cnn"}
    assert {"tutorial", "direct", "resident"} <= set(figures["mlp"])
    assert all(rate["low"] <= rate["median"] <= rate["high"] for ways in figures.values() for rate in ways.values())
