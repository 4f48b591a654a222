"""Usage: figures told apart, the share of a container, and what a model holds counted once."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hotloop.errors import HotloopError
from hotloop.memory import usage as module
from hotloop.memory.usage import Usage, holdings, machine_memory, main_memory_left, usage

GIB = 2**30


@pytest.fixture(autouse=True)
def _a_large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=60 * GIB, total=64 * GIB))


def written(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def test_a_cpu_has_a_process_and_a_machine_and_no_allocator() -> None:
    now = usage("cpu")
    assert now.allocated is None
    assert now.reserved is None
    assert now.cached is None
    assert now.process is not None
    assert now.process > 2**20
    assert Usage.from_json(json.loads(json.dumps(now.to_json()))) == now


def test_a_device_that_tells_nothing_is_unknown_and_not_zero() -> None:
    now = usage("meta")
    assert (now.allocated, now.reserved, now.process, now.free, now.total) == (None,) * 5
    assert str(now) == "meta: unknown"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "banana"])
def test_a_device_that_is_not_here_is_refused_with_the_choices(device: str) -> None:
    with pytest.raises(HotloopError, match=rf"you asked for '?{device}.*\n +fix: .*choose one of what is here: cpu"):
        usage(device)


def test_the_words_name_each_figure_once() -> None:
    now = Usage("cuda:0", allocated=GIB, reserved=2 * GIB, process=3 * GIB, free=10 * GIB, total=16 * GIB)
    assert now.cached == GIB
    assert now.others == 3 * GIB
    said = "1.0 GiB allocated, 2.0 GiB reserved, 3.0 GiB in this process, 3.0 GiB in others, 10.0 GiB free of 16.0 GiB"
    assert str(now) == f"cuda:0: {said}"


def test_without_the_share_of_this_process_that_of_others_is_unknown() -> None:
    assert Usage("cuda:0", free=GIB, total=2 * GIB).others is None
    assert "others" not in str(Usage("cuda:0", free=GIB, total=2 * GIB))


def test_a_machine_without_limits_has_all_its_memory(tmp_path: Path) -> None:
    assert machine_memory(tmp_path) == (60 * GIB, 64 * GIB)
    written(tmp_path / "sys/fs/cgroup", memory_max="max", memory_current=5)
    assert machine_memory(tmp_path) == (60 * GIB, 64 * GIB)


def test_a_container_has_its_share(tmp_path: Path) -> None:
    written(tmp_path / "sys/fs/cgroup", memory_max=4 * GIB, memory_current=GIB)
    assert machine_memory(tmp_path) == (3 * GIB, 4 * GIB)


def test_cached_files_do_not_count_as_used(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    written(group, memory_max=4 * GIB, memory_current=4 * GIB, memory_stat=f"anon 5\ninactive_file {2 * GIB}")
    assert machine_memory(tmp_path) == (2 * GIB, 4 * GIB)


def test_the_older_control_groups_are_read_too(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory"
    written(group, memory_limit_in_bytes=4 * GIB, memory_usage_in_bytes=GIB, memory_stat=f"total_inactive_file {2**20}")
    assert machine_memory(tmp_path) == (3 * GIB + 2**20, 4 * GIB)
    written(group, memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=GIB)  # how they say that there is none
    assert machine_memory(tmp_path) == (60 * GIB, 64 * GIB)


@pytest.mark.parametrize(
    ("line", "base", "names"),
    [
        ("0::/jobs/one", "sys/fs/cgroup", ("memory_max", "memory_current")),
        ("7:cpu,memory:/jobs/one", "sys/fs/cgroup/memory", ("memory_limit_in_bytes", "memory_usage_in_bytes")),
    ],
)
def test_the_tightest_group_around_the_process_counts(
    tmp_path: Path, line: str, base: str, names: tuple[str, str]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n{line}\n")
    written(tmp_path / base / "jobs", **{names[0]: 8 * GIB, names[1]: 7 * GIB})
    written(tmp_path / base / "jobs/one", **{names[0]: 6 * GIB, names[1]: GIB})
    written(tmp_path / base / "other", **{names[0]: 1, names[1]: 1})
    assert machine_memory(tmp_path) == (1 * GIB, 6 * GIB)


@given(limit=st.one_of(st.none(), st.integers(0, 2**62)), used=st.one_of(st.none(), st.integers(0, 2**62)))
def test_free_is_never_more_than_there_is(
    tmp_path_factory: pytest.TempPathFactory, limit: int | None, used: int | None
) -> None:
    root = tmp_path_factory.mktemp("root")
    files = {"memory_max": limit, "memory_current": used}
    written(root / "sys/fs/cgroup", **{name: value for name, value in files.items() if value is not None})
    free, total = machine_memory(root)
    assert 0 <= free <= total <= 64 * GIB
    if limit is not None:
        assert total <= limit


@pytest.mark.parametrize("text", ["", "nonsense", "-5", "12 34", "\0"])
def test_files_that_make_no_sense_are_no_limit(tmp_path: Path, text: str) -> None:
    written(tmp_path / "sys/fs/cgroup", memory_max=text, memory_current=text, memory_stat=text)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(text)
    assert machine_memory(tmp_path) == (60 * GIB, 64 * GIB)


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
    monkeypatch.setattr(module, "_counts_like_the_driver", lambda: like_the_driver)
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
    assert before.allocated is not None
    assert before.reserved is not None
    assert before.allocated >= kept.nbytes
    del kept
    after = usage("cuda")
    assert after.allocated is not None
    assert before.allocated - after.allocated >= 2**30
    assert after.reserved == before.reserved
    assert after.free is not None
    assert after.total is not None
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
