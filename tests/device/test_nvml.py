import inspect
import re
import sys
from types import SimpleNamespace

import pynvml
import pytest

from hotloop.device.facts import InstalledGpu
from hotloop.device.machine import NvmlReading, nvml_reading


class NVMLError(Exception):
    pass


class NVMLError_LibRmVersionMismatch(NVMLError):
    value = 18


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine of two GPUs, behind the calls that hotloop makes."""
    closed: list[bool] = []
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetName=lambda handle: b"NVIDIA T4" if handle else "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(free=100 + handle),
        nvmlSystemGetCudaDriverVersion_v2=lambda: 12080,
        nvmlSystemGetDriverVersion=lambda: "570.86.10",
        closed=closed,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def refuse(*_: object) -> None:
    raise NVMLError("not supported")


def test_all_that_nvml_tells(library: SimpleNamespace) -> None:
    told = nvml_reading()
    assert told.driver == "570.86.10"
    assert told.driver_cuda == (12, 8)
    assert told.cards == (InstalledGpu("NVIDIA H200", "GPU-0"), InstalledGpu("NVIDIA T4", "GPU-1"))
    assert (told.free_of("1"), told.free_of("9"), told.free_of(None)) == (101, None, None)
    assert library.closed == [True]


@pytest.mark.parametrize(
    ("question", "lost"),
    [
        ("nvmlDeviceGetCount", {"cards": None, "free": ()}),
        ("nvmlDeviceGetHandleByIndex", {"cards": (), "free": ()}),
        ("nvmlDeviceGetMemoryInfo", {"free": ()}),
        ("nvmlDeviceGetUUID", {"cards": (InstalledGpu("NVIDIA H200"), InstalledGpu("NVIDIA T4")), "free": ()}),
        ("nvmlSystemGetCudaDriverVersion_v2", {"driver_cuda": None}),
        ("nvmlSystemGetDriverVersion", {"driver": None}),
        ("nvmlShutdown", {}),
    ],
)
def test_a_refused_question_loses_that_answer_alone(
    library: SimpleNamespace, question: str, lost: dict[str, object]
) -> None:
    whole = nvml_reading()
    setattr(library, question, refuse)
    told = nvml_reading()
    for name in ("driver", "driver_cuda", "cards", "free", "mismatch"):
        assert getattr(told, name) == lost.get(name, getattr(whole, name)), name


@pytest.mark.parametrize(("error", "mismatch"), [(NVMLError, False), (NVMLError_LibRmVersionMismatch, True)])
def test_a_library_that_does_not_start(library: SimpleNamespace, error: type[NVMLError], mismatch: bool) -> None:
    def fail() -> None:
        raise error

    library.nvmlInit = fail
    assert nvml_reading() == NvmlReading(mismatch=mismatch)
    assert library.closed == []


def test_the_real_binding_has_the_names_that_are_asked_for() -> None:
    asked = re.findall(r'"(nvml\w+)"', inspect.getsource(nvml_reading))
    assert len(asked) == 8
    assert [name for name in ("nvmlInit", *asked) if not hasattr(pynvml, name)] == []
