"""Kernels are loaded in threads beside a run, of which the run notices nothing."""

import pytest
import torch

from hotloop.kernels.preload import bf16_matmuls, load_beside
from hotloop.tune.gate import comparison


@pytest.mark.parametrize("device", ["cpu", "cuda:0"], ids=["a CPU", "a simulated GPU"])
def test_there_may_be_nothing_to_load(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (), {"__module__": "hotloop.apps.simulate.cuda"}))
    assert load_beside(torch.device(device), asked.append) is None
    assert asked == []


@pytest.mark.gpu
def test_they_are_used_once_on_each_device() -> None:
    gpu, asked = torch.device("cuda", 0), list[torch.device]()
    use = asked.append
    thread = load_beside(gpu, use)
    thread.join()
    assert load_beside(gpu, use) is None
    assert asked == [gpu]


@pytest.mark.gpu
@pytest.mark.parametrize("use", [bf16_matmuls, comparison])
def test_what_is_used_draws_no_random_numbers_and_does_not_fail(use: object) -> None:
    gpu = torch.device("cuda", 0)
    before = torch.cuda.get_rng_state(gpu), torch.get_rng_state()
    assert callable(use)
    use(gpu)
    assert torch.equal(torch.cuda.get_rng_state(gpu), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.gpu
def test_what_fails_in_the_thread_ends_there() -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError(f"no kernel on {device}")

    thread = load_beside(torch.device("cuda", 0), fails)
    thread.join()  # pytest makes an error of what a thread raises
