"""The zoo on a GPU: a captured step trains what the eager loop does, to the bit, or says why it is not captured."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .trainings import ZOO, Training

# A captured step reads the learning rate in 32 bits; of these schedules, or for such weights, it is not the same there.
ROUNDED = ("stochastic_weight_averaging", "one_cycle_each_step", "float64_weights")
members = pytest.mark.parametrize("training", [each for each in ZOO if each.cuda], ids=lambda each: each.name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every training gave, in a process in which cuBLAS is deterministic."""
    environment = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "HOTLOOP_CACHE": str(tmp_path_factory.mktemp("cache")),
    }
    script = Path(__file__).with_name("on_cuda.py")
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    results: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return results


@pytest.mark.gpu
@members
def test_the_gpu_trains_the_same(training: Training, found: dict[str, Any]) -> None:
    result = found[training.name]
    if "skipped" in result:
        pytest.skip(result["skipped"])
    for plan, seen in result.items():
        if "refused" in seen:
            continue
        assert "error" not in seen, f"{plan}: {seen['error']}"
        assert not seen["rounding" if training.name in ROUNDED else "differences"], (plan, seen)
        if not seen.get("captured", True):
            assert any("CUDA graph" in words for words in seen["words"]), f"{plan}: nobody was told why"
