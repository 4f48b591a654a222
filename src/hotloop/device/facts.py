"""What is known of the machine, as plain records: what is unknown is None, never 0. No torch here."""

import re
from dataclasses import dataclass
from typing import Literal

from hotloop.printing.text import printable
from hotloop.records import Record

ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True)
class InstalledGpu(Record):
    """An NVIDIA GPU that the machine holds, whether or not torch can use it."""

    name: str
    uuid: str | None = None


@dataclass(frozen=True)
class VisibleGpu(Record):
    """A GPU as torch numbers it."""

    index: int
    name: str
    capability: tuple[int, int]
    free: int | None = None  # bytes
    total: int | None = None
    gfx: str | None = None  # AMD's name of the architecture; None on NVIDIA

    def __str__(self) -> str:
        return f"cuda:{self.index} ({self.name})"


@dataclass(frozen=True)
class Cpu(Record):
    """The processor and the main memory."""

    name: str | None = None
    physical: int | None = None  # cores
    logical: int | None = None
    usable: int | None = None  # logical cores that this process may run on
    free: int | None = None  # bytes of RAM
    total: int | None = None


@dataclass(frozen=True)
class MachineFacts(Record):
    """Everything that decides which device can be used, and why not another one."""

    system: str = "Linux"  # as `platform.system()` says it: Linux, Darwin, Windows
    platform: str | None = None
    macos: tuple[int, ...] | None = None
    variant: Literal["wsl", "jetson"] | None = None  # where the driver does not show as /dev/nvidia*
    in_container: bool = False

    torch_version: str | None = None
    torch_cuda: str | None = None  # the CUDA that torch was built for; None for a build without
    torch_hip: str | None = None  # the ROCm of a build for AMD, which torch presents as "cuda"
    arch_list: tuple[str, ...] = ()  # what the build holds code for; empty where it does not tell
    cudnn: str | None = None
    gpus: tuple[VisibleGpu, ...] = ()
    cuda_error: str | None = None  # what torch said when CUDA failed to start

    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver runs
    driver_mismatch: bool = False  # the loaded kernel module and the installed library differ
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    hardware: tuple[InstalledGpu, ...] | None = None  # NVIDIA GPUs in the machine, told by others than torch
    nodes: tuple[tuple[str, str], ...] = ()  # ("/dev/nvidia0", "ok" or "denied")

    mps_built: bool = False
    mps_available: bool = False
    xpu_built: bool = False
    accelerators: tuple[tuple[str, str], ...] = ()  # of other kinds, that torch can use: ("xpu:0", "Intel Arc A770")
    cpu: Cpu = Cpu()

    @property
    def usable(self) -> tuple[VisibleGpu, ...]:
        """The GPUs that this build of torch holds code for."""
        return tuple(gpu for gpu in self.gpus if self.covers(gpu))

    def covers(self, gpu: VisibleGpu) -> bool:
        """Whether this build of torch holds code that runs on `gpu`; yes where the build does not tell."""
        if not self.arch_list:
            return True
        if self.torch_hip is not None:
            return gpu.gfx is None or gpu.gfx in self.arch_list
        return any(runs_on(arch, gpu.capability) for arch in self.arch_list)


@dataclass(frozen=True)
class Cause(Record):
    """One reason why a device cannot be used, and what to do about it."""

    code: str
    what: str
    fix: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", printable(self.what))  # names and errors in it come from drivers

    def __str__(self) -> str:
        return f"{self.what} (fix: {self.fix})"


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code built for `arch` runs on a GPU of that compute capability.

    >>> runs_on("sm_80", (8, 6)), runs_on("sm_86", (8, 0)), runs_on("compute_80", (12, 0))
    (True, False, True)
    """
    match = ARCH.fullmatch(arch)
    if match is None:
        return False
    kind, major, minor, suffix = match.groups()
    built = (int(major), int(minor))
    if suffix == "a":  # uses features of that one architecture
        return built == capability
    if kind == "compute" and not suffix:  # PTX, which the driver compiles for any newer GPU
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it.

    >>> dotted((12, 8))
    '12.8'
    """
    return ".".join(map(str, version))
