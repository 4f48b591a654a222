"""What others than torch tell of the machine: files of the operating system under a root, psutil, and NVML."""

import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from hotloop.device.facts import Cpu, InstalledGpu
from hotloop.monitor.main_memory import machine_memory, text_of

DRIVER = re.compile(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)")
CONTAINERS = ("docker", "containerd", "kubepods", "libpod", "lxc")


def driver_version(root: Path) -> str | None:
    """The version of the NVIDIA kernel module that is loaded."""
    match = DRIVER.search(text_of(root / "proc/driver/nvidia/version") or "")
    return match[1] if match else None


def variant(root: Path) -> Literal["wsl", "jetson"] | None:
    """The kinds of Linux machine that reach the GPU by other ways than /dev/nvidia*."""
    if (root / "dev/dxg").exists():
        return "wsl"
    if "nvidia,tegra" in (text_of(root / "proc/device-tree/compatible") or ""):
        return "jetson"
    return None


def cards_on_bus(root: Path, system: str) -> tuple[InstalledGpu, ...] | None:
    """The NVIDIA display controllers on the PCI bus; None where the bus does not tell."""
    if system == "Darwin":  # macOS has had no driver for NVIDIA GPUs since 10.14
        return ()
    kind = variant(root)
    if kind == "wsl":  # Windows holds the bus
        return None
    if kind == "jetson":  # the GPU is part of the chip
        model = (text_of(root / "proc/device-tree/model") or "").strip("\0 \n")
        return (InstalledGpu(model or "NVIDIA Jetson"),)
    bus = root / "sys/bus/pci/devices"
    if not bus.is_dir():
        return None
    return tuple(card for slot in sorted(bus.iterdir()) if (card := _card(slot)) is not None)


def _card(slot: Path) -> InstalledGpu | None:
    vendor = (text_of(slot / "vendor") or "").strip()
    if vendor != "0x10de" or not (text_of(slot / "class") or "").startswith("0x03"):
        return None
    device = (text_of(slot / "device") or "").strip().removeprefix("0x")
    return InstalledGpu(f"NVIDIA GPU {slot.name}" + (f" [10de:{device}]" if device else ""))


def nodes(root: Path) -> tuple[tuple[str, str], ...]:
    """The device files that CUDA opens, and whether this process may.

    >>> nodes(Path("/nowhere"))
    ()
    """
    found = [*sorted((root / "dev").glob("nvidia[0-9]*")), root / "dev/nvidiactl", root / "dev/nvidia-uvm"]
    return tuple(
        (f"/{node.relative_to(root).as_posix()}", "ok" if os.access(node, os.R_OK | os.W_OK) else "denied")
        for node in found
        if node.exists()
    )


def in_container(root: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether there are signs of Docker, Podman, Kubernetes or LXC."""
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists() or environ.get("container"):
        return True
    groups = text_of(root / "proc/1/cgroup") or ""
    return any(name in groups for name in CONTAINERS)


def cpu(root: Path) -> Cpu:
    """The processor, the cores this process may use, and the memory it may take."""
    free, total = machine_memory(root)
    return Cpu(
        cpu_name(root), psutil.cpu_count(logical=False), psutil.cpu_count(), usable_cores(root), free=free, total=total
    )


def cpu_name(root: Path = Path("/")) -> str:
    """The processor as its maker calls it, else its architecture: Linux does not name ARM processors."""
    match = re.search(r"^model name\s*:\s*(\S.*)$", text_of(root / "proc/cpuinfo") or "", re.MULTILINE)
    if match:
        return match[1].strip()
    return _apple_name() or platform.processor() or platform.machine() or "CPU"


def _apple_name() -> str | None:
    if platform.system() != "Darwin":
        return None
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None


def usable_cores(root: Path = Path("/")) -> int:
    """How many cores this process may use; of a container, its share of the time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    older = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # the first version of control groups
    for files in (("cpu.max",), older):
        words = " ".join(text_of(root / "sys/fs/cgroup" / name) or "" for name in files).split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            return max(1, min(usable, math.floor(int(words[0]) / int(words[1]) + 0.5)))
    return usable


@dataclass(frozen=True)
class NvmlReading:
    """One reading of NVML; empty where the library is absent or refuses."""

    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    cards: tuple[InstalledGpu, ...] | None = None
    free: tuple[tuple[str, int], ...] = ()  # (uuid, bytes)
    mismatch: bool = False

    def free_of(self, uuid: str | None) -> int | None:
        """Free bytes of the GPU with this UUID, which torch writes without NVML's "GPU-"."""
        return dict(self.free).get(f"GPU-{uuid}")


def nvml_reading() -> NvmlReading:
    """What NVIDIA's management library tells of driver and GPUs, without starting CUDA on any of them."""
    from hotloop.monitor.host import decoded  # noqa: PLC0415
    from hotloop.monitor.nvml_gpus import LIB_RM_VERSION_MISMATCH, Failed, Library  # noqa: PLC0415  # not where the CPU is asked for

    try:
        library = Library()
    except Failed as error:
        return NvmlReading(mismatch=error.code == LIB_RM_VERSION_MISMATCH)
    ask = library.or_none
    cards: list[InstalledGpu] = []
    free: list[tuple[str, int]] = []
    count = ask("nvmlDeviceGetCount")
    for index in range(count or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:  # a GPU that fell off the bus, or one that is not ours
            continue
        uuid = decoded(ask("nvmlDeviceGetUUID", handle))
        cards.append(InstalledGpu(decoded(ask("nvmlDeviceGetName", handle)) or "NVIDIA GPU", uuid))
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        if uuid is not None and memory is not None:
            free.append((uuid, int(memory.free)))
    version = ask("nvmlSystemGetCudaDriverVersion_v2")
    driver = decoded(ask("nvmlSystemGetDriverVersion"))
    ask("nvmlShutdown")
    return NvmlReading(
        driver=driver,
        driver_cuda=None if version is None else (version // 1000, version % 1000 // 10),
        cards=None if count is None else tuple(cards),
        free=tuple(free),
    )
