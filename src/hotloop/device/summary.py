"""One record of device, choice and machine, which becomes JSON or a panel in the terminal."""

import platform
from dataclasses import dataclass

import torch

from hotloop.device.causes import Cause
from hotloop.device.choice import Choice
from hotloop.device.facts import Cpu, MachineFacts, VisibleGpu
from hotloop.records import Record


@dataclass(frozen=True)
class DeviceMemory(Record):
    free: int | None
    total: int | None


@dataclass(frozen=True)
class CudaVersions(Record):
    """The CUDA that torch was built for, and the newest that the driver runs."""

    build: str | None
    driver: str | None


@dataclass(frozen=True)
class GpuLine(Record):
    index: int
    name: str
    capability: str
    memory: DeviceMemory
    usable: bool  # this build of torch holds code for it


@dataclass(frozen=True)
class DeviceSummary(Record):
    """What `hotloop device` shows. None means unknown, or not a thing that this device has."""

    device: str
    name: str
    precision: str
    reason: str
    causes: tuple[Cause, ...]
    memory: DeviceMemory
    capability: str | None
    driver: str | None
    cuda: CudaVersions
    cudnn: str | None
    tf32: bool | None
    bf16: bool | None
    fp16: bool | None
    gpus: tuple[GpuLine, ...]
    cpu: Cpu
    torch: str | None
    rocm: str | None
    python: str
    platform: str | None
    hotloop: str


def summarize(choice: Choice, facts: MachineFacts, *, version: str) -> DeviceSummary:
    """Join what was chosen and what is known; `version` is hotloop's own, which this layer does not import."""
    gpu = next((gpu for gpu in facts.gpus if choice.device == torch.device("cuda", gpu.index)), None)
    nvidia = gpu if facts.torch_hip is None else None  # AMD numbers its architectures otherwise
    return DeviceSummary(
        device=str(choice.device),
        name=choice.name,
        precision=choice.precision,
        reason=choice.reason,
        causes=choice.causes,
        memory=_memory(choice, facts, gpu),
        capability=None if gpu is None else _dotted(gpu.capability),
        driver=facts.driver,
        cuda=CudaVersions(facts.torch_cuda, None if facts.driver_cuda is None else _dotted(facts.driver_cuda)),
        cudnn=facts.cudnn,
        tf32=None if nvidia is None else nvidia.capability >= (8, 0),
        bf16=None if nvidia is None else nvidia.capability >= (8, 0),
        fp16=None if nvidia is None else nvidia.capability >= (7, 0),
        gpus=tuple(
            GpuLine(
                each.index, each.name, _dotted(each.capability), DeviceMemory(each.free, each.total), facts.covers(each)
            )
            for each in facts.gpus
        ),
        cpu=facts.cpu,
        torch=facts.torch_version,
        rocm=facts.torch_hip,
        python=platform.python_version(),
        platform=facts.platform,
        hotloop=version,
    )


def _memory(choice: Choice, facts: MachineFacts, gpu: VisibleGpu | None) -> DeviceMemory:
    if gpu is not None:
        return DeviceMemory(gpu.free, gpu.total)
    if choice.device.type in ("cpu", "mps"):  # a Mac's GPU shares the main memory
        return DeviceMemory(facts.cpu.free, facts.cpu.total)
    return DeviceMemory(None, None)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
