"""The benchmark that kills a training runs and writes what it found."""

import json
import os
from pathlib import Path

import pytest

from ..warm import Warm

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_it_runs_and_writes_what_it_found(tmp_path: Path, warm: Warm) -> None:
    ran = warm.run(BENCHMARK, "--kills", "2", "--seed", "7", "--json", str(tmp_path / "r.json"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["seed"], found["kills"], found["lives"]) == (7, 2, 3)
    assert found["bit-equal to the run that was never killed"]
    assert {"date", "hardware", "versions", "seconds", "steps", "kills during a save"} <= found.keys()
