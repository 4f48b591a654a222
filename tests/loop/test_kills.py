"""A run that is killed at any moment, while it saves too, ends as one that never was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"
KILLS = 12


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_kills_at_random_moments(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--kills", str(KILLS), "--json", str(tmp_path / "r.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["bit-equal to the run that was never killed"], f"seed {found['seed']}"
    assert found["kills"] == KILLS
