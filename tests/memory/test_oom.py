"""What out-of-memory looks like, and what is said about it."""

import pytest
import torch

from hotloop.errors import DoesNotFit
from hotloop.memory import oom
from hotloop.memory.oom import Failure, began_with, clear, does_not_fit, half_updated, is_out_of_memory, surely
from hotloop.memory.usage import DeviceHoldings, Usage

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.9 GB)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_out_of_memory_by_type_and_by_message(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"),
        ValueError("out of memory, says somebody's own check"),
        DoesNotFit("a single item does not fit into the memory"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: str(error)[:40],
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_error_that_others_came_of() -> None:
    first = torch.OutOfMemoryError("full")
    second = RuntimeError("operation failed due to a previous error during capture")
    second.__context__ = first
    third = ValueError("cannot be recorded")
    third.__cause__ = second
    assert began_with(third) is first
    assert began_with(first) is first


def test_a_call_that_runs_out_is_made_again_but_not_for_ever() -> None:
    calls: list[int] = []

    def fails(times: int) -> int:
        calls.append(1)
        if len(calls) <= times:
            raise torch.OutOfMemoryError("full")
        return 7

    assert surely(lambda: fails(3), CPU) == 7
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):
        surely(lambda: fails(100), CPU)
    assert len(calls) == oom.ATTEMPTS
    calls.clear()

    def refuses() -> None:
        calls.append(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        surely(refuses, CPU)
    assert len(calls) == 1


def test_nothing_is_repeated_in_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "is_capturing", lambda: True)
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        surely(fails, CPU)
    assert len(calls) == 1


def test_clearing_a_cpu_is_no_error() -> None:
    clear(CPU)
    assert not oom.is_capturing() or torch.cuda.is_available()


def said(monkeypatch: pytest.MonkeyPatch, held: DeviceHoldings, allocated: int | None, now: Usage) -> str:
    monkeypatch.setattr(oom, "usage", lambda device: now)
    return str(does_not_fit(Failure("Tried to allocate 2.00 GiB", allocated), held, CPU))


def test_activations_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    held = DeviceHoldings("cuda:0", parameters=GIB, gradients=GIB, optimizer=2 * GIB)
    now = Usage("cuda:0", allocated=4 * GIB, reserved=4 * GIB, process=5 * GIB, free=19 * GIB, total=24 * GIB)
    words = said(monkeypatch, held, 20 * GIB, now)
    assert "parameters 1.0 GiB, gradients 1.0 GiB, optimizer state 2.0 GiB, activations 16.0 GiB" in words
    assert "other processes 0 B, of 24.0 GiB" in words
    assert "Tried to allocate 2.00 GiB" in words
    assert "make the items smaller" in words
    assert "SGD" not in words


def test_weights_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    held = DeviceHoldings("cuda:0", parameters=6 * GIB, gradients=5 * GIB, optimizer=12 * GIB)
    now = Usage("cuda:0", total=24 * GIB)
    words = said(monkeypatch, held, 23 * GIB, now)
    assert "saves up to 12.0 GiB" in words
    assert "smaller model" in words
    assert "make the items smaller" not in words
    assert "other processes" not in words, "what is unknown is not said"


def test_other_processes_and_memory_in_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    held = DeviceHoldings("cuda:0", parameters=GIB)
    now = Usage("cuda:0", allocated=GIB, reserved=9 * GIB, process=10 * GIB, free=2 * GIB, total=24 * GIB)
    words = said(monkeypatch, held, 2 * GIB, now)
    assert "end the other processes, which hold 12.0 GiB" in words
    assert "expandable_segments" in words


def test_a_device_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    words = said(monkeypatch, DeviceHoldings("cpu", parameters=4096), None, Usage("cpu"))
    assert "parameters 4.0 KiB" in words
    assert "activations" not in words.split("fix")[0]


def test_weights_that_may_be_half_updated() -> None:
    error = half_updated(torch.OutOfMemoryError("CUDA out of memory.\nmore"))
    assert isinstance(error, DoesNotFit)
    assert "some of them may be updated" in error.what
    assert "CUDA out of memory." in error.what
    assert "checkpoint" in str(error.fix)
