"""The benchmark of what people bring: both loops train the same, and what came of it is written."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import Import


@pytest.fixture
def everyday(benchmark: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    return benchmark("everyday")


@pytest.mark.parametrize("name", ["equation", "graph", "packed", "autoencoder", "recommendation"])
def test_both_loops_train_the_same(everyday: Any, name: str) -> None:
    found = everyday.measured(name, 0.02, torch.device("cpu"), small=True)
    tutorial, default = found.losses
    assert default == pytest.approx(tutorial, rel=1e-5)
    assert found.steps >= 1
    assert found.times > 0


def test_a_machine_that_stalls_has_a_pace_all_the_same(everyday: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first timed step may take longer than there is time for."""
    monkeypatch.setattr(everyday.time, "perf_counter", itertools.count().__next__)
    pace, losses, _ = everyday.by_hand(everyday.CASES["table"](small=True), 0.5, torch.device("cpu"))
    assert pace == 1
    assert losses


def test_it_tells_and_writes_what_came_of_it(
    everyday: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def apart(name: str, arguments: Any) -> Any:
        seconds, device = arguments.seconds, torch.device(arguments.device)
        return "it broke" if name == "field" else everyday.measured(name, seconds, device, small=arguments.quick)

    out = tmp_path / "r.json"
    told = ["table", "field", "--quick", "--seconds", "0.02", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(everyday, "apart", apart)
    monkeypatch.setattr("sys.argv", ["everyday.py", *told])
    everyday.main()
    written, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert {"command", "date", "commit", "hardware", "versions"} <= set(written)
    (outcome,) = written["outcomes"]
    assert outcome["losses"][0] == pytest.approx(outcome["losses"][1])
    assert written["missing"] == {"field": "it broke"}
    assert "field: it broke" in printed
    assert "under 0.97" in printed
