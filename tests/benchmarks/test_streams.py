"""The benchmark of the streams runs and writes what it found."""

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
    streams = importlib.import_module("streams")
    cnn = streams.cnn
    monkeypatch.setattr(streams, "cnn", lambda rows: cnn(rows // 16))  # whose epochs take seconds even when quick
    command = ["streams.py", "--quick", "--repeats", "1", "--json", str(tmp_path / "r.json")]
    monkeypatch.setattr(sys, "argv", command)
    streams.main()
    assert "small cnn" in capsys.readouterr().out
    figures = json.loads((tmp_path / "r.json").read_text())["items_per_second"]
    assert set(figures) == {"mlp", "small cnn"}
    assert {"tutorial", "direct", "resident"} <= set(figures["mlp"])
    assert all(rate["low"] <= rate["median"] <= rate["high"] for ways in figures.values() for rate in ways.values())
