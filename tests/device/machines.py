"""Machines that the tests are run on without owning them."""

from dataclasses import replace

from hotloop.device.facts import Cpu, InstalledGpu, MachineFacts, VisibleGpu

GIB = 2**30
NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
H200 = VisibleGpu(0, "NVIDIA H200", (9, 0), 130 * GIB, 139 * GIB)

HEALTHY = MachineFacts(
    system="Linux",
    platform="Linux-6.8.0-x86_64",
    torch_version="2.13.0+cu130",
    torch_cuda="13.0",
    arch_list=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    cudnn="9.10.2",
    gpus=(H200,),
    driver="580.95.05",
    driver_cuda=(13, 0),
    hardware=(InstalledGpu("NVIDIA H200", "GPU-aaaa-1"),),
    nodes=tuple((node, "ok") for node in NODES),
    cpu=Cpu("AMD EPYC 9654", 96, 192, 16, 100 * GIB, 128 * GIB),
)
BLIND = replace(HEALTHY, gpus=())  # all is in order, and yet torch sees no GPU
BARE = replace(BLIND, hardware=(), driver=None, driver_cuda=None, nodes=())
LAPTOP = replace(BARE, torch_version="2.13.0+cpu", torch_cuda=None, arch_list=(), cudnn=None)
MAC = MachineFacts(
    system="Darwin",
    macos=(14, 5),
    torch_version="2.13.0",
    hardware=(),
    mps_built=True,
    mps_available=True,
    cpu=Cpu("Apple M2", 8, 8, 8, 9 * GIB, 16 * GIB),
)


def gpu(index: int, free: int | None, capability: tuple[int, int] = (8, 0), name: str = "NVIDIA A100") -> VisibleGpu:
    return VisibleGpu(index, name, capability, free, 80 * GIB)
