from collections.abc import Callable
from dataclasses import replace

import pytest

from hotloop.device.causes import why_no_cuda, why_no_mps, why_none
from hotloop.device.facts import Cause, MachineFacts, VisibleGpu

from .machines import BARE, BLIND, GIB, HEALTHY, LAPTOP, MAC, NODES

PASCAL = VisibleGpu(0, "GTX 1080", (6, 1), 7 * GIB, 8 * GIB)
RUBIN = VisibleGpu(0, "Rubin", (13, 0), 200 * GIB, 288 * GIB)
DENIED = tuple((node, "denied") for node in NODES)
NO_DRIVER = replace(BLIND, driver=None, driver_cuda=None, nodes=())
OLD = replace(BLIND, driver="535.104.05", driver_cuda=(12, 2))
MI300 = VisibleGpu(0, "AMD Instinct MI300X", (9, 4), gfx="gfx942")


@pytest.mark.parametrize(
    ("facts", "code", "words"),
    [
        (replace(BLIND, torch_cuda=None), "cpu-build", ["2.13.0+cu130", "pip install --force-reinstall torch"]),
        (replace(BLIND, torch_cuda=None, system="Windows"), "cpu-build", ["pytorch.org/get-started"]),
        (BARE, "no-hardware", ["no NVIDIA GPU"]),
        (replace(MAC, mps_available=False), "no-hardware", ["macOS has no CUDA"]),
        (NO_DRIVER, "no-driver", ["NVIDIA H200", "ubuntu-drivers", "nvidia.com/drivers"]),
        (replace(NO_DRIVER, hardware=None), "no-driver", ["cannot be told"]),
        (replace(NO_DRIVER, in_container=True), "no-driver", ["on the host", "docker run --gpus all"]),
        (replace(NO_DRIVER, variant="wsl", hardware=None), "no-driver", ["in Windows", "wsl --shutdown"]),
        (replace(NO_DRIVER, system="Windows", hardware=None), "no-driver", ["nvidia.com/drivers"]),
        (replace(BLIND, driver_mismatch=True), "driver-mismatch", ["580.95.05", "restart"]),
        (OLD, "old-driver", ["13.0", "580.65", "535.104.05", "12.2", "CUDA 12 ("]),
        (replace(OLD, driver_cuda=None), "old-driver", ["580.65", "535.104.05", "an older CUDA"]),
        (replace(OLD, torch_cuda="12.8", driver="470.1", driver_cuda=(11, 4)), "old-driver", ["525.60", "CUDA 11 ("]),
        (
            replace(BLIND, nodes=(), in_container=True),
            "no-nodes",
            [*NODES, "docker run --gpus all", "podman run"],
        ),
        (replace(BLIND, nodes=()), "no-nodes", ["sudo nvidia-modprobe -u -c 0"]),
        (replace(BLIND, nodes=BLIND.nodes[:2]), "no-nodes", ["/dev/nvidia-uvm is missing"]),
        (replace(BLIND, nodes=DENIED), "no-permission", [*NODES, "ls -l /dev/nvidia*", "usermod -aG video $USER"]),
        (replace(BLIND, visible=""), "hidden", ["CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"]),
        (replace(BLIND, visible="3"), "hidden", ["'3'", "has GPU 0"]),
        (replace(BLIND, visible="-1", system="Windows"), "hidden", ["$Env:CUDA_VISIBLE_DEVICES = $null"]),
        (replace(BLIND, gpus=(PASCAL,)), "unsupported-arch", ["GTX 1080", "6.1", "sm_75", "an older build", "sm_61"]),
        (replace(BLIND, gpus=(RUBIN,)), "unsupported-arch", ["Rubin", "13.0", "sm_120", "a newer build", "sm_130"]),
        (BLIND, "unknown", ["does not say why", "nvidia-smi"]),
        (replace(BLIND, cuda_error="CUDA unknown\n\terror \x1b[2J"), "unknown", ["CUDA unknown error \\x1b[2J"]),
        (replace(BLIND, torch_cuda=None, torch_hip="6.4"), "rocm-build", ["AMD", "NVIDIA's", "build for CUDA"]),
        (
            replace(BARE, torch_cuda=None, torch_hip="6.4", cuda_error="No HIP"),
            "rocm-build",
            ["No HIP", "rocminfo"],
        ),
        (
            MachineFacts(torch_hip="6.4", arch_list=("gfx90a",), gpus=(MI300,)),
            "unsupported-arch",
            ["MI300X", "gfx942", "gfx90a"],
        ),
    ],
)
def test_each_situation_has_its_cause(facts: MachineFacts, code: str, words: list[str]) -> None:
    first = why_no_cuda(facts)[0]
    assert first.code == code
    for word in words:
        assert word in str(first)


@pytest.mark.parametrize(
    ("facts", "codes"),
    [
        (LAPTOP, ["no-hardware", "cpu-build"]),
        (replace(NO_DRIVER, torch_cuda=None, visible=""), ["cpu-build", "no-driver", "hidden"]),
        (replace(OLD, nodes=DENIED[:2], visible="-1"), ["old-driver", "no-nodes", "no-permission", "hidden"]),
        (replace(BLIND, torch_cuda=None, nodes=DENIED), ["cpu-build", "no-permission"]),
        (replace(BLIND, driver_mismatch=True, driver=None), ["driver-mismatch"]),
        (replace(BARE, visible="-1"), ["no-hardware"]),
        (replace(BLIND, hardware=()), ["unknown"]),  # a loaded driver outweighs an empty bus
        (replace(BLIND, nodes=(), variant="wsl"), ["unknown"]),
        (replace(BLIND, nodes=(), variant="jetson"), ["unknown"]),
        (replace(BLIND, nodes=(), system="Windows"), ["unknown"]),
        (replace(BLIND, gpus=(PASCAL, replace(RUBIN, index=1)), visible="-1"), ["unsupported-arch"] * 2),
    ],
)
def test_the_most_fundamental_cause_comes_first(facts: MachineFacts, codes: list[str]) -> None:
    assert [cause.code for cause in why_no_cuda(facts)] == codes


@pytest.mark.parametrize(
    "facts",
    [
        replace(BLIND, torch_cuda="13.0", driver="580.65.06", driver_cuda=None),
        replace(BLIND, torch_cuda="12.8", driver="550.54", driver_cuda=(12, 4)),  # minor versions are compatible
        replace(BLIND, torch_cuda="12.8", driver="580.95", driver_cuda=(13, 0)),
        replace(BLIND, torch_cuda="14.0", driver="1.0", driver_cuda=None),  # a CUDA whose driver nobody told yet
        replace(BLIND, driver="mystery", driver_cuda=None),
    ],
)
def test_a_driver_is_called_old_only_where_that_is_known(facts: MachineFacts) -> None:
    assert [cause.code for cause in why_no_cuda(facts)] == ["unknown"]


def test_a_build_without_cuda_does_not_matter_without_a_gpu() -> None:
    build = why_no_cuda(LAPTOP)[1]
    assert "does not matter" in build.what
    assert build.fix.startswith("once there is one")


def why_no_xpu(facts: MachineFacts) -> Cause | None:
    return why_none(facts, "xpu", "Intel GPU")


@pytest.mark.parametrize(
    ("why", "facts", "code"),
    [
        (why_no_mps, MAC, None),
        (why_no_mps, HEALTHY, "not-macos"),
        (why_no_mps, replace(MAC, mps_available=False, mps_built=False), "no-mps-build"),
        (why_no_mps, replace(MAC, mps_available=False, macos=(12, 2)), "old-macos"),
        (why_no_mps, replace(MAC, mps_available=False, macos=(12, 3)), "no-metal"),
        (why_no_mps, replace(MAC, mps_available=False, macos=None), "no-metal"),
        (why_no_xpu, HEALTHY, "no-xpu-build"),
        (why_no_xpu, replace(HEALTHY, xpu_built=True), "no-xpu"),
        (why_no_xpu, replace(HEALTHY, xpu_built=True, accelerators=(("xpu:0", "Intel Arc A770"),)), None),
    ],
)
def test_why_no_other_device(
    why: Callable[[MachineFacts], Cause | None], facts: MachineFacts, code: str | None
) -> None:
    cause = why(facts)
    assert (cause and cause.code) == code
