"""The benchmark of starts: both loops in processes of their own, by turns."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "starts.py"


def test_both_loops_are_timed_in_new_processes(tmp_path: Path) -> None:
    out = tmp_path / "starts.json"
    told = ["mlp", "--quick", "--device", "cpu", "--seconds", "0.05", "--turns", "1", "--out", str(out)]
    done = subprocess.run([sys.executable, BENCHMARK, *told], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (start,) = json.loads(out.read_text())["starts"]
    assert start["items"] > 0
    assert len(start["tutorial"]) == len(start["default"]) == 1
    assert start["times"] == start["tutorial"][0] / start["default"][0]
    assert "times the tutorial's loop" in done.stdout


def test_what_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    told = ["mlp", "--quick", "--device", "cpu", "--out", str(tmp_path / "nowhere" / "a.json")]
    done = subprocess.run([sys.executable, BENCHMARK, *told], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no folder" in done.stderr
