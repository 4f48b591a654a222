"""What a device has: memory that can still be taken, and what else hotloop asks for by no name of a device."""

import pytest
import torch

import hotloop
from hotloop.device.backend import backend_of

CUDA = backend_of("cuda:0")
UNNUMBERED = backend_of("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """100 bytes, of which others have 10; this process holds 40 and uses 25 of them."""
    told = {"mem_get_info": (50, 100), "memory_reserved": 40, "memory_allocated": 25}
    for name, answer in {**told, "get_per_process_memory_fraction": 1.0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    return monkeypatch


def test_what_pytorch_holds_can_be_taken_and_is_not_free(gpu: pytest.MonkeyPatch) -> None:
    assert (CUDA.free_memory(), CUDA.room()) == (50, 65)


def test_a_cap_counts(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.6)
    assert (CUDA.free_memory(), CUDA.room()) == (20, 35)


def test_a_cpu_does_not_tell() -> None:
    assert backend_of("cpu").free_memory() is backend_of("cpu").room() is None


def test_a_gpu_without_a_number_is_the_current_one() -> None:
    with hotloop.simulate("h200"):
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert UNNUMBERED.memory_share() == CUDA.memory_share() == 0.5
        assert (UNNUMBERED.free_memory(), UNNUMBERED.room()) == (CUDA.free_memory(), CUDA.room())


@pytest.mark.gpu
def test_a_gpu_without_a_number_is_the_current_one_on_cuda() -> None:
    index = torch.cuda.current_device()
    assert UNNUMBERED.memory_share() == backend_of(f"cuda:{index}").memory_share() == 1.0
    assert UNNUMBERED.free_memory() > 0


@pytest.mark.parametrize(
    ("device", "platform", "backend", "version", "can"),
    [
        ("cuda", "linux", "native", "13.0", True),
        ("cpu", "linux", "native", "13.0", False),
        ("cuda", "win32", "native", "13.0", False),
        ("cuda", "linux", "cudaMallocAsync", "13.0", False),
        ("cuda", "linux", "native", None, False),
    ],
)
def test_only_cuda_on_linux_has_expandable_segments(
    device: str, platform: str, backend: str, version: str | None, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr("sys.platform", platform)
    assert backend_of(device).has_expandable_segments() is can
