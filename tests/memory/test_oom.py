"""What out-of-memory looks like, and what is said about it."""

from contextlib import nullcontext

import pytest
import torch

from hotloop.errors import DoesNotFit
from hotloop.memory import oom
from hotloop.memory.oom import Failure, began_with, does_not_fit, half_updated, is_out_of_memory, surely
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


@pytest.mark.parametrize(
    ("error", "fails", "calls", "captures"),
    [
        (torch.OutOfMemoryError("full"), 3, 4, False),
        (torch.OutOfMemoryError("full"), 100, oom.ATTEMPTS, False),
        (torch.OutOfMemoryError("full"), 100, 1, True),
        (ValueError("mine"), 100, 1, False),
    ],
    ids=["in the end", "never", "in a capture", "another error"],
)
def test_a_call_that_runs_out_is_made_again_but_not_for_ever(
    error: Exception, fails: int, calls: int, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom, "is_capturing", lambda: captures)
    made: list[int] = []

    def call() -> int:
        made.append(1)
        if len(made) <= fails:
            raise error
        return 7

    with pytest.raises(type(error)) if fails == 100 else nullcontext():
        assert surely(call, CPU) == 7
    assert len(made) == calls


# What a model holds, bytes in tensors, the figures of the device, what is said and what is not.
FULL: dict[str, tuple[DeviceHoldings, int | None, Usage, list[str], list[str]]] = {
    "activations": (
        DeviceHoldings("cuda:0", parameters=GIB, gradients=GIB, optimizer=2 * GIB),
        20 * GIB,
        Usage("cuda:0", allocated=4 * GIB, reserved=4 * GIB, process=5 * GIB, free=19 * GIB, total=24 * GIB),
        [
            "parameters 1.0 GiB, gradients 1.0 GiB, optimizer state 2.0 GiB, activations 16.0 GiB",
            "other processes 0 B, of 24.0 GiB",
            "Tried to allocate 2.00 GiB",
            "make the items smaller",
        ],
        ["SGD"],
    ),
    "weights": (
        DeviceHoldings("cuda:0", parameters=6 * GIB, gradients=5 * GIB, optimizer=12 * GIB),
        23 * GIB,
        Usage("cuda:0", total=24 * GIB),
        ["saves up to 12.0 GiB", "smaller model"],
        ["make the items smaller", "other processes"],
    ),
    "others, and memory in no tensor": (
        DeviceHoldings("cuda:0", parameters=GIB),
        2 * GIB,
        Usage("cuda:0", allocated=GIB, reserved=9 * GIB, process=10 * GIB, free=2 * GIB, total=24 * GIB),
        ["end the other processes, which hold 12.0 GiB", "expandable_segments"],
        [],
    ),
    "nothing is told": (
        DeviceHoldings("cpu", parameters=4096),
        None,
        Usage("cpu"),
        ["parameters 4.0 KiB"],
        ["activations", "other processes"],
    ),
}


@pytest.mark.parametrize(("held", "allocated", "now", "says", "omits"), FULL.values(), ids=FULL)
def test_what_fills_the_memory_and_what_to_do(
    held: DeviceHoldings,
    allocated: int | None,
    now: Usage,
    says: list[str],
    omits: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(oom, "usage", lambda device: now)
    words = str(does_not_fit(Failure("Tried to allocate 2.00 GiB", allocated), held, CPU))
    assert all(word in words for word in says)
    assert not any(word in words for word in omits)


def test_weights_that_may_be_half_updated() -> None:
    error = half_updated(torch.OutOfMemoryError("CUDA out of memory.\nmore"))
    assert isinstance(error, DoesNotFit)
    assert "some of them may be updated" in error.what
    assert "CUDA out of memory." in error.what
    assert "checkpoint" in str(error.fix)
