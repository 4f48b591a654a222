"""Reads the machine into `MachineFacts`. Nothing here raises: what cannot be read stays unknown."""

import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from hotloop.device import machine
from hotloop.device.backend import BACKENDS, backend_of
from hotloop.device.facts import Cpu, MachineFacts, VisibleGpu
from hotloop.device.machine import NvmlReading

T = TypeVar("T")


def probe(root: Path = Path("/")) -> MachineFacts:
    """All that is known of this machine; `root` is where its /proc, /sys and /dev are.

    >>> probe().torch_version == torch.__version__
    True
    """
    system = platform.system()
    told = _or(NvmlReading(), machine.nvml_reading)
    gpus, cuda_error = _gpus(told)
    cards = told.cards if told.cards else _or(None, lambda: machine.cards_on_bus(root, system))
    return MachineFacts(
        system=system,
        platform=_or(None, platform.platform),
        macos=_or(None, _macos),
        variant=_or(None, lambda: machine.variant(root)),
        in_container=_or(False, lambda: machine.in_container(root)),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        arch_list=_or((), lambda: tuple(torch.cuda.get_arch_list())),
        cudnn=_or(None, _cudnn),
        gpus=gpus,
        cuda_error=cuda_error,
        driver=told.driver or _or(None, lambda: machine.driver_version(root)),
        driver_cuda=told.driver_cuda,
        driver_mismatch=told.mismatch,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        hardware=cards,
        nodes=_or((), lambda: machine.nodes(root)),
        mps_built=_or(False, torch.backends.mps.is_built),
        mps_available=_or(False, torch.backends.mps.is_available),
        xpu_built=getattr(torch.version, "xpu", None) is not None,
        accelerators=_or((), _accelerators),
        cpu=_or(Cpu(), lambda: machine.cpu(root)),
    )


def _or(unknown: T, read: Callable[[], T]) -> T:
    """What `read` finds, or `unknown`: the one gate through which every fragile reading goes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read()
    except Exception:  # noqa: BLE001  # a broken driver may raise anything, and a probe must say so, not die
        return unknown


def _gpus(told: NvmlReading) -> tuple[tuple[VisibleGpu, ...], str | None]:
    """The GPUs that torch sees, or what torch says about seeing none."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (), None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if not torch.cuda.is_available():
                # raises with the reason, of which `is_available` warns once per process at most
                torch.cuda.init()
            gpus = tuple(_gpu(index, told) for index in range(torch.cuda.device_count()))
        except Exception as error:  # noqa: BLE001  # whatever CUDA raises is a fact to keep
            return (), str(error).strip() or type(error).__name__
    return gpus, None if gpus or not said else str(said[0].message)


def _gpu(index: int, told: NvmlReading) -> VisibleGpu:
    properties = torch.cuda.get_device_properties(index)
    total = int(properties.total_memory)
    return VisibleGpu(
        index=index,
        name=str(properties.name),
        capability=(int(properties.major), int(properties.minor)),
        free=_free(index, told.free_of(str(getattr(properties, "uuid", None))), total),
        total=total,
        gfx=None if torch.version.hip is None else str(properties.gcnArchName).split(":")[0],
    )


def _free(index: int, told: int | None, total: int) -> int | None:
    """Free bytes, from NVML where it knows them: asking CUDA would take memory on a GPU nobody chose."""
    if told is not None and told <= total * 1.05:  # more is the whole GPU, where torch sees a slice of it
        return min(told, total)
    return _or(None, lambda: int(torch.cuda.mem_get_info(index)[0]))


def _cudnn() -> str | None:
    version = torch.backends.cudnn.version()
    return None if version is None else _dotted(version)


def _dotted(version: int) -> str:
    """cuDNN's version, which the library gives as one number.

    >>> _dotted(90100), _dotted(8902)
    ('9.1.0', '8.9.2')
    """
    base = 10_000 if version >= 90_000 else 1_000
    return f"{version // base}.{version % base // 100}.{version % 100}"


def _macos() -> tuple[int, ...] | None:
    numbers = [int(part) for part in platform.mac_ver()[0].split(".") if part.isdecimal()]
    return tuple(numbers) or None


def _accelerators() -> tuple[tuple[str, str], ...]:
    """The devices of other kinds than those that facts of their own tell of."""
    others = [kind for kind in BACKENDS if kind not in ("cuda", "mps", "cpu")]
    return tuple((f"{kind}:{index}", name) for kind in others for index, name in enumerate(backend_of(kind).names()))
