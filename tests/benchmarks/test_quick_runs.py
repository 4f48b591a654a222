"""Benchmarks of one page run, on a machine without a GPU too, and write what they find."""

import ast
import json
import sys
from pathlib import Path

import pytest
import torch

from ..warm import Warm, stand_in
from .conftest import BENCHMARKS, Import


def test_what_hotloop_costs(
    benchmark: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overheads = benchmark("overheads")
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


def test_streams(
    benchmark: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = benchmark("streams")
    cnn = streams.cnn
    monkeypatch.setattr(streams, "cnn", lambda rows: cnn(rows // 32))  # whose epochs take seconds even when quick
    monkeypatch.setattr(sys, "argv", ["streams.py", "--quick", "--repeats", "1", "--json", str(tmp_path / "r.json")])
    streams.main()
    assert "small cnn" in capsys.readouterr().out
    figures = json.loads((tmp_path / "r.json").read_text())["items_per_second"]
    assert set(figures) == {"mlp", "small cnn"}
    assert {"tutorial", "direct", "resident"} <= set(figures["mlp"])
    assert all(rate["low"] <= rate["median"] <= rate["high"] for ways in figures.values() for rate in ways.values())


def test_starts_of_both_loops_in_new_processes(
    benchmark: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], warm: Warm
) -> None:
    starts, out = benchmark("starts"), tmp_path / "starts.json"
    told = ["mlp", "--quick", "--device", "cpu", "--seconds", "0.05", "--turns", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "starts.py"), *told])
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, warm.server))
    starts.main()
    (start,) = json.loads(out.read_text())["starts"]
    assert start["items"] > 0
    assert len(start["tutorial"]) == len(start["default"]) == 1
    assert start["times"] == start["tutorial"][0] / start["default"][0]
    assert "times the tutorial's loop" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["lightning", "accelerate", "trainer"])
def test_the_scripts_of_a_page_are_found_and_made_larger(page: str, benchmark: Import) -> None:
    shared, other, own = benchmark("coming_from").scripts_of(page)
    for script in (shared, other, own):
        ast.parse(script)
    assert "16448" in shared
    assert "hotloop" in own
    assert "hotloop" not in other
    assert "shuffle" not in shared + own


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch warns of itself where the compiler is reset
def test_a_run_in_which_nothing_is_said_needs_the_memory_that_its_steps_need(
    benchmark: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking, trials and captures need no more than the tutorial's steps or the plan do, up to a little."""
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    found = benchmark("peak_memory").measured("cnn", 400, torch.device("cuda", 0))
    assert "graph" in found.plan
    assert found.ratio < 1.2
