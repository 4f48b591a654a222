"""Looking, trials and captures need no more memory than the tutorial's steps or the plan do, up to a little."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

# PyTorch warns of itself where the compiler is reset.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def peak_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    return importlib.import_module("peak_memory")


def test_a_run_in_which_nothing_is_said_needs_what_its_steps_need(peak_memory: Any) -> None:
    found = peak_memory.measured("cnn", 400, torch.device("cuda", 0))
    assert "graph" in found.plan
    assert found.ratio < 1.2
