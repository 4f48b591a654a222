"""A run that is killed at any moment, while it saves too, ends as one that never was."""

import json
import os
from pathlib import Path

import pytest

from ..thorough import tries
from ..warm import Warm

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"
KILLS = tries(1, 12)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_kills_at_random_moments(tmp_path: Path, warm: Warm) -> None:
    ran = warm.run(BENCHMARK, "--kills", str(KILLS), "--json", str(tmp_path / "r.json"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["bit-equal to the run that was never killed"], f"seed {found['seed']}"
    assert (found["kills"], found["lives"]) == (KILLS, KILLS + 1)
    assert {"date", "hardware", "versions", "seconds", "steps", "kills during a save"} <= found.keys()
