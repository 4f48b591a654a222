"""What only a real CUDA GPU can show."""

import json
import os
import subprocess
import sys

import pytest
import torch

from hotloop.device import pick
from hotloop.device.backend import precision_for
from hotloop.device.probe import probe

pytestmark = pytest.mark.gpu


def fresh(code: str, **environ: str) -> dict[str, object]:
    """What the code prints as JSON, in a process of its own."""
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"} | environ
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_gpu_is_chosen_with_the_precision_that_suits_it() -> None:
    choice = pick()
    assert choice.device.type == "cuda"
    assert choice.precision == precision_for(torch.cuda.get_device_capability(choice.device))
    assert choice.name == torch.cuda.get_device_name(choice.device)
    assert choice.name in choice.reason
    assert torch.ones(3, device=choice.device).sum().item() == 3


def test_the_facts_of_the_gpu() -> None:
    facts = probe()
    gpu = facts.gpus[0]
    assert facts.driver
    assert facts.driver_cuda
    assert facts.hardware
    assert facts.cuda_error is None
    assert gpu.name == torch.cuda.get_device_name(0)
    assert 0 < gpu.free <= gpu.total


def test_free_memory_is_that_of_cuda() -> None:
    free, total = torch.cuda.mem_get_info(0)
    told = probe().gpus[0].free
    assert abs(told - free) < 0.05 * total


@pytest.mark.parametrize("visible", ["", "-1", "99", "GPU-none"])
def test_hidden_gpus_are_explained(visible: str) -> None:
    code = "import json; from hotloop.device import pick; print(json.dumps(pick('auto').to_json()))"
    choice = fresh(code, CUDA_VISIBLE_DEVICES=visible)
    assert choice["device"] == "cpu"
    assert [cause["code"] for cause in choice["causes"]] == ["hidden"]


def test_a_probe_takes_no_memory_on_the_gpu() -> None:
    pytest.importorskip("pynvml")
    code = """
import json, pynvml
from hotloop.device.probe import probe
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
probe()
print(json.dumps({"taken": pynvml.nvmlDeviceGetMemoryInfo(handle).used - before}))
"""
    assert fresh(code)["taken"] < 100 * 2**20  # a CUDA context takes several hundred MiB
