"""How much memory of a GPU can still be taken: other processes, a cap, and what PyTorch holds count."""

import pytest
import torch

import hotloop
from hotloop.device.room import free, room, share

CUDA = torch.device("cuda", 0)
UNNUMBERED = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """100 bytes, of which others have 10; this process holds 40 and uses 25 of them."""
    told = {"mem_get_info": (50, 100), "memory_reserved": 40, "memory_allocated": 25}
    for name, answer in {**told, "get_per_process_memory_fraction": 1.0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    return monkeypatch


def test_what_pytorch_holds_can_be_taken_and_is_not_free(gpu: pytest.MonkeyPatch) -> None:
    assert (free(CUDA), room(CUDA)) == (50, 65)


def test_a_cap_counts(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.6)
    assert (free(CUDA), room(CUDA)) == (20, 35)


def test_a_cpu_does_not_tell() -> None:
    assert free(torch.device("cpu")) is room(torch.device("cpu")) is None


def test_a_gpu_without_a_number_is_the_current_one() -> None:
    with hotloop.simulate("h200"):
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert share(UNNUMBERED) == share(CUDA) == 0.5
        assert (free(UNNUMBERED), room(UNNUMBERED)) == (free(CUDA), room(CUDA))


@pytest.mark.gpu
def test_a_gpu_without_a_number_is_the_current_one_on_cuda() -> None:
    index = torch.cuda.current_device()
    assert share(UNNUMBERED) == share(torch.device("cuda", index)) == 1.0
    assert free(UNNUMBERED) > 0
