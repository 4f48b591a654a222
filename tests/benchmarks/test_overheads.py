"""The benchmark of what hotloop costs runs and writes what it found."""

import json
from pathlib import Path

from ..warm import Warm

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "overheads.py"


def test_it_runs_and_writes_what_it_found(tmp_path: Path, warm: Warm) -> None:
    ran = warm.run(BENCHMARK, "--quick", "--json", str(tmp_path / "r.json"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads((tmp_path / "r.json").read_text())
    assert figures["step"]["over_low"] <= figures["step"]["over"] <= figures["step"]["over_high"]
    assert figures["golden_rule"]["inside"] > figures["golden_rule"]["outside"]
    assert figures["hook"]["without"] > 0
    assert figures["sprites_per_second"] > 0
