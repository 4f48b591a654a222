from dataclasses import replace

import pytest

from hotloop.device import MachineFacts
from hotloop.device.choice import pick_from
from hotloop.device.facts import VisibleGpu
from hotloop.device.summary import DeviceMemory, DeviceSummary, summarize

from .machines import GIB, HEALTHY, LAPTOP, MAC, gpu


def taken(facts: MachineFacts, want: str = "auto") -> DeviceSummary:
    return summarize(pick_from(facts, want), facts, version="1.2.3")


def test_a_gpu_is_told_in_full() -> None:
    seen = taken(HEALTHY)
    assert (seen.device, seen.name, seen.capability) == ("cuda:0", "NVIDIA H200", "9.0")
    assert (seen.driver, seen.cuda.build, seen.cuda.driver, seen.cudnn) == ("580.95.05", "13.0", "13.0", "9.10.2")
    assert seen.memory == DeviceMemory(130 * GIB, 139 * GIB)
    assert seen.hotloop == "1.2.3"


@pytest.mark.parametrize(
    ("capability", "flags"),
    [
        ((6, 1), (False, False, False)),
        ((7, 5), (False, False, True)),
        ((8, 0), (True, True, True)),
        ((9, 0), (True, True, True)),
    ],
)
def test_what_the_hardware_is_fast_in(capability: tuple[int, int], flags: tuple[bool, ...]) -> None:
    seen = taken(replace(HEALTHY, arch_list=(), gpus=(gpu(0, GIB, capability),)))
    assert (seen.tf32, seen.bf16, seen.fp16) == flags


@pytest.mark.parametrize("facts", [LAPTOP, MAC], ids=["cpu", "mps"])
def test_without_cuda_the_memory_is_the_main_memory_and_the_rest_unknown(facts: MachineFacts) -> None:
    seen = taken(facts)
    assert seen.memory == DeviceMemory(facts.cpu.free, facts.cpu.total)
    assert (seen.capability, seen.tf32, seen.bf16, seen.fp16, seen.gpus) == (None, None, None, None, ())


def test_what_an_amd_gpu_can_do_is_not_read_off_a_number_that_nvidia_defined() -> None:
    seen = taken(MachineFacts(torch_hip="6.4", gpus=(VisibleGpu(0, "AMD Instinct MI300X", (9, 4), gfx="gfx942"),)))
    assert (seen.device, seen.rocm, seen.tf32) == ("cuda:0", "6.4", None)


def test_memory_of_an_intel_gpu_is_unknown() -> None:
    assert taken(replace(LAPTOP, xpus=("Arc",))).memory == DeviceMemory(None, None)


def test_every_gpu_is_listed_and_the_unusable_one_marked() -> None:
    seen = taken(replace(HEALTHY, gpus=(gpu(0, GIB, (6, 1)), gpu(1, None))))
    assert [(line.index, line.usable, line.memory.free) for line in seen.gpus] == [(0, False, GIB), (1, True, None)]


def test_the_summary_of_a_cpu_choice_keeps_the_gpu_facts() -> None:
    seen = taken(HEALTHY, "cpu")
    assert (seen.device, seen.driver, len(seen.gpus), seen.capability) == ("cpu", "580.95.05", 1, None)
