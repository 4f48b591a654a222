"""Usage: figures told apart, the share of a container, and what a model holds counted once."""

import json
import os
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from hotloop.memory import usage as module
from hotloop.memory.usage import Usage, holdings, main_memory_left, usage

GIB = 2**30


def test_a_cpu_has_a_process_and_a_machine_and_no_allocator() -> None:
    now = usage("cpu")
    assert now.allocated is None
    assert now.reserved is None
    assert now.cached is None
    assert now.process > 2**20
    assert Usage.from_json(json.loads(json.dumps(now.to_json()))) == now


def test_a_device_that_tells_nothing_is_unknown_and_not_zero() -> None:
    now = usage("meta")
    assert (now.allocated, now.reserved, now.process, now.free, now.total) == (None,) * 5
    assert str(now) == "meta: unknown"


def test_the_words_name_each_figure_once() -> None:
    now = Usage("cuda:0", allocated=GIB, reserved=2 * GIB, process=3 * GIB, free=10 * GIB, total=16 * GIB)
    assert now.cached == GIB
    assert now.others == 3 * GIB
    said = "1.0 GiB allocated, 2.0 GiB reserved, 3.0 GiB in this process, 3.0 GiB in others, 10.0 GiB free of 16.0 GiB"
    assert str(now) == f"cuda:0: {said}"


def test_without_the_share_of_this_process_that_of_others_is_unknown() -> None:
    assert Usage("cuda:0", free=GIB, total=2 * GIB).others is None
    assert "others" not in str(Usage("cuda:0", free=GIB, total=2 * GIB))


class FakeNvml:
    """NVML with a few processes on its one GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self, *processes: tuple[int, int | None]) -> None:
        self._processes = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-abc":
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return self._processes


@pytest.mark.parametrize(
    ("uuid", "processes", "like_the_driver", "known"),
    [
        ("abc", [("own", 900), (1, 5)], True, 900),
        ("abc", [("own", 900)], False, 900),  # nobody else is there, so it cannot be a stranger
        ("abc", [("own", 900), (1, 5)], False, None),  # in a container the number may be another's
        ("abc", [("own", 300)], True, None),  # less than the allocator holds: it is another's
        ("abc", [("own", None)], True, None),
        ("abc", [(1, 900)], True, None),
        ("mig", [("own", 900)], True, None),
    ],
)
def test_the_share_of_this_process_is_told_only_where_it_is_certain(
    monkeypatch: pytest.MonkeyPatch,
    uuid: str,
    processes: list[tuple[str | int, int | None]],
    like_the_driver: bool,
    known: int | None,
) -> None:
    listed = [(os.getpid() if pid == "own" else int(pid), used) for pid, used in processes]
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml(*listed))
    monkeypatch.setattr("hotloop.monitor.processes.sees_whole_machine", lambda: like_the_driver)
    assert module._process(uuid, reserved=500) == known


def test_a_model_and_its_optimizer_to_the_byte() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = 4 * (10 * 20 + 20 + 20 + 20)
    buffers = 4 * (20 + 20) + 8
    assert holdings(model, optimizer).on("cpu").total == weights + buffers
    model(torch.randn(4, 10)).sum().backward()
    assert holdings(model, optimizer).on("cpu").gradients == weights
    optimizer.step()
    held = holdings(model, [optimizer]).on("cpu")
    assert (held.parameters, held.buffers, held.gradients, held.optimizer) == (weights, buffers, weights, weights)
    assert holdings(model, optimizer).total == held.total == 3 * weights + buffers


def test_tied_weights_and_views_count_once() -> None:
    tied = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    tied[1].weight = tied[0].weight
    assert holdings(tied).total == 4 * 50 * 8
    flat = torch.zeros(100)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:40]), nn.Parameter(flat[40:])
    assert holdings(model).total == 400


def test_each_device_has_its_own_line() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3, device="meta"))
    held = holdings(model)
    assert held.on("cpu").parameters == 4 * 6
    assert held.on("meta").parameters == 4 * 12
    assert len(str(held).splitlines()) == 2
    assert held.on("cuda:0").total == 0


def test_parts_of_sparse_tensors_count() -> None:
    embedding = nn.Embedding(1000, 4, sparse=True)
    embedding(torch.tensor([1, 2, 3])).sum().backward()
    assert holdings(embedding).on("cpu").gradients == 3 * 8 + 3 * 4 * 4


@pytest.mark.gpu
def test_a_gpu_tells_its_figures_apart() -> None:
    kept = torch.zeros(2**28, device="cuda")
    before = usage("cuda")
    assert before.device == f"cuda:{torch.cuda.current_device()}"
    assert before.reserved is not None
    assert before.allocated >= kept.nbytes
    del kept
    after = usage("cuda")
    assert before.allocated - after.allocated >= 2**30
    assert after.reserved == before.reserved
    assert 0 < after.free < after.total
    assert after.process is None or after.process >= after.reserved


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="Linux alone tells the limits of a process")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process_counts(kind: str) -> None:
    process, limit = psutil.Process(), getattr(psutil, kind, None)
    before, now = process.rlimit(limit), process.memory_info()
    most = {"RLIMIT_AS": now.vms, "RLIMIT_DATA": now.data}[kind] + GIB
    free = main_memory_left()
    process.rlimit(limit, (most, before[1]))
    try:
        left = main_memory_left()
    finally:
        process.rlimit(limit, before)
    assert GIB / 2 < left <= GIB < free
