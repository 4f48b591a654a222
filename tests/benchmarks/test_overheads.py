"""The benchmark of what hotloop costs runs and writes what it found."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_it_runs_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    overheads = importlib.import_module("overheads")
    step, hook, make = overheads.step_overhead, overheads.hook_cost, overheads.make
    monkeypatch.setattr(overheads, "step_overhead", lambda device, steps, options: step(device, steps // 5, options))
    monkeypatch.setattr(overheads, "hook_cost", lambda device, steps: hook(device, steps // 10, turns=2))
    monkeypatch.setattr(overheads, "make", lambda sprites, device: make(sprites // 16, device=device))
    monkeypatch.setattr(sys, "argv", ["overheads.py", "--quick", "--json", str(tmp_path / "r.json")])
    overheads.main()
    assert "a step that clips" in capsys.readouterr().out
    figures = json.loads((tmp_path / "r.json").read_text())
    assert figures["step"]["over_low"] <= figures["step"]["over"] <= figures["step"]["over_high"]
    assert figures["golden_rule"]["inside"] > figures["golden_rule"]["outside"]
    assert figures["hook"]["without"] > 0
    assert figures["sprites_per_second"] > 0
