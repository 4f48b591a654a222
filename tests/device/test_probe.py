import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotloop.device import machine
from hotloop.device.facts import InstalledGpu, MachineFacts
from hotloop.device.machine import NvmlReading
from hotloop.device.probe import probe

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."
GIB = 2**30


def raise_(*_: object) -> None:
    raise RuntimeError("broken")


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with CUDA on a machine whose CUDA does not start."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(machine, "nvml_reading", NvmlReading)


@pytest.fixture
def one_gpu(cuda_build: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One GPU of 80 GiB; gives the list of GPUs whose memory was asked of CUDA."""
    asked: list[int] = []
    properties = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=80 * GIB, uuid="aaaa")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (asked.append(index), (7 * GIB, 80 * GIB))[1])
    return asked


def test_the_real_machine() -> None:
    facts = probe()
    assert facts.torch_version == torch.__version__
    assert facts.cpu.name
    assert facts.cpu.usable >= 1
    assert 0 < facts.cpu.free <= facts.cpu.total
    assert MachineFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_nvml_is_believed_before_the_bus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = InstalledGpu("NVIDIA H200", "GPU-1")
    monkeypatch.setattr(machine, "nvml_reading", lambda: NvmlReading("580.1", (13, 0), (card,), mismatch=True))
    facts = probe(tmp_path)
    assert (facts.driver, facts.driver_cuda, facts.hardware, facts.driver_mismatch) == ("580.1", (13, 0), (card,), True)


@pytest.mark.usefixtures("cuda_build")
def test_the_error_of_cuda_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.cuda, "init", init)
    assert probe().cuda_error == TOO_OLD


@pytest.mark.usefixtures("cuda_build")
def test_the_warning_of_cuda_is_kept_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn(f"CUDA initialization: {TOO_OLD}", UserWarning, stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        facts = probe()
    assert facts.cuda_error == f"CUDA initialization: {TOO_OLD}"
    assert shown == []


def test_free_memory_comes_from_nvml_and_leaves_cuda_alone(one_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvml_reading", lambda: NvmlReading(free=(("GPU-bbbb", 1), ("GPU-aaaa", 9 * GIB))))
    (gpu,) = probe().gpus
    assert (gpu.name, gpu.capability, gpu.free, gpu.total) == ("NVIDIA A100", (8, 0), 9 * GIB, 80 * GIB)
    assert one_gpu == []


@pytest.mark.parametrize(
    "told",
    [NvmlReading(), NvmlReading(free=(("GPU-bbbb", 1),)), NvmlReading(free=(("GPU-aaaa", 640 * GIB),))],
    ids=["no NVML", "another GPU", "the whole of a sliced GPU"],
)
def test_free_memory_is_asked_of_cuda_where_nvml_does_not_know(
    one_gpu: list[int], monkeypatch: pytest.MonkeyPatch, told: NvmlReading
) -> None:
    monkeypatch.setattr(machine, "nvml_reading", lambda: told)
    assert probe().gpus[0].free == 7 * GIB
    assert one_gpu == [0]


@pytest.mark.usefixtures("one_gpu")
def test_free_memory_that_nobody_tells_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", raise_)
    assert probe().gpus[0].free is None


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("broken", "field", "unknown"),
    [
        ("hotloop.device.machine.nvml_reading", "driver_mismatch", False),
        ("hotloop.device.machine.cpu_name", "cpu", type(probe().cpu)()),
        ("hotloop.device.machine.nodes", "nodes", ()),
        ("hotloop.device.machine.in_container", "in_container", False),
        ("hotloop.device.machine.variant", "variant", None),
        ("hotloop.device.machine.cards_on_bus", "hardware", None),
        ("platform.platform", "platform", None),
        ("torch.cuda.is_available", "cuda_error", "broken"),
        ("torch.cuda.device_count", "cuda_error", "broken"),
        ("torch.cuda.get_arch_list", "arch_list", ()),
        ("torch.backends.cudnn.version", "cudnn", None),
        ("torch.backends.mps.is_available", "mps_available", False),
        ("torch.xpu.is_available", "accelerators", ()),
    ],
)
def test_whatever_is_broken_leaves_one_thing_unknown(
    monkeypatch: pytest.MonkeyPatch, broken: str, field: str, unknown: object
) -> None:
    monkeypatch.setattr(broken, raise_)
    assert getattr(probe(), field) == unknown


def test_the_visible_devices_are_kept_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " 1,x")
    assert probe().visible == os.environ["CUDA_VISIBLE_DEVICES"]
