"""Who the processes are: named where they can be, never with another's name, and forgotten when they have ended."""

import gc
import os
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.monitor.nvml_gpus import merged
from hotloop.monitor.processes import HOST_PIDS, WHOLE_MACHINE, People, held_by_torch
from hotloop.monitor.reading import Process

from ..thorough import tries

GIB = 2**30
GONE = 2**22 + 1  # higher than any PID


@contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that waits until it is ended, and has begun when this one goes on."""
    code = "import sys; print('begun', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def whole_machine(tmp_path: Path) -> Path:
    """A /proc of a process that sees the PIDs which the driver gives."""
    return proc(tmp_path, WHOLE_MACHINE)


@pytest.fixture
def container(tmp_path: Path) -> Path:
    return proc(tmp_path, "pid:[4026532901]")


def proc(folder: Path, namespace: str) -> Path:
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/pid").symlink_to(namespace)
    return folder


def opens(proc: Path, pid: int, *files: str) -> None:
    fds = proc / str(pid) / "fd"
    fds.mkdir(parents=True)
    for number, file in enumerate(files):
        (fds / str(number)).symlink_to(file)


def rows(*pids: int, memory: int | None = GIB) -> dict[str, tuple[Process, ...]]:
    return {"GPU-0": tuple(Process(pid, memory, "compute") for pid in pids)}


def test_a_process_has_its_name_and_everything(whole_machine: Path) -> None:
    people = People(whole_machine)
    with child("\x1b[2J<script>", os.fsdecode(b"\xff\xfe"), "--epochs", "3 4") as process:
        named, note = people.name(rows(process.pid))
        again, _ = people.name(rows(process.pid))
        expected = psutil.Process(process.pid)
        (first,), (second,) = named["GPU-0"], again["GPU-0"]
        assert note is None
        assert (first.pid, first.memory, first.kind) == (process.pid, GIB, "compute")
        assert first.name == expected.name()
        assert first.command is not None
        assert first.command.endswith("--epochs '3 4'")
        assert "\x1b[2J<script>" in first.command, "data, which whoever shows it escapes"
        assert "��" in first.command
        first.command.encode()
        assert first.user == expected.username()
        assert first.started == expected.create_time()
        assert first.ours
        assert first.cpu is None  # a difference needs two looks
        assert second.cpu is not None
    named, note = people.name(rows(process.pid, os.getpid(), os.getppid()))
    assert named["GPU-0"][0] == Process(process.pid, GIB, "compute"), "it has ended"
    assert [each.ours for each in named["GPU-0"][1:]] == [True, False]
    assert note is None


def test_a_process_that_ends_in_the_middle_of_a_look(whole_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: psutil.Process) -> str:
        raise psutil.NoSuchProcess(self.pid)

    def denied(self: psutil.Process) -> str:
        raise psutil.AccessDenied(self.pid)

    for method in ("name", "cpu_percent", "parents"):
        monkeypatch.setattr(psutil.Process, method, gone)
    for method in ("cmdline", "username"):
        monkeypatch.setattr(psutil.Process, method, denied)
    (process,) = People(whole_machine).name(rows(os.getppid()))[0]["GPU-0"]
    assert (process.name, process.command, process.user, process.ours) == (None, None, None, False)
    assert process.started is not None


class Pretended:
    """A process that is there under any PID; `life` is which of those that had the PID one after the other."""

    alive: ClassVar[weakref.WeakSet["Pretended"]] = weakref.WeakSet()
    life: ClassVar[int] = 1

    def __init__(self, pid: int) -> None:
        self.pid, self.born = pid, Pretended.life
        Pretended.alive.add(self)

    def is_running(self) -> bool:
        return self.born == Pretended.life

    def create_time(self) -> float:
        return float(self.born)

    def name(self) -> str:
        return f"life {self.born}"

    def cmdline(self) -> list[str]:
        return ["train", "x" * 10**6]

    def username(self) -> str:
        raise psutil.AccessDenied(self.pid)

    def parents(self) -> list[object]:
        return []

    def cpu_percent(self) -> float:
        return 50.0


def test_a_pid_that_was_given_to_another_process_is_not_taken_for_the_first(
    whole_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "Process", Pretended)
    people = People(whole_machine)
    monkeypatch.setattr(Pretended, "life", 1)
    assert [people.name(rows(7))[0]["GPU-0"][0].cpu for _ in range(2)] == [None, 50]
    monkeypatch.setattr(Pretended, "life", 2)
    (other,) = people.name(rows(7))[0]["GPU-0"]
    assert (other.name, other.started, other.cpu) == ("life 2", 2, None)


def test_thousands_of_processes_leave_nothing_behind(whole_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "Process", Pretended)
    people = People(whole_machine)
    tracemalloc.start()
    try:
        for first in range(10**6, 10**6 + tries(3_000, 10_000), 100):
            people.name(rows(*range(first, first + 100)))
            assert len(Pretended.alive) <= 200
        assert tracemalloc.get_traced_memory()[0] < 4 * 2**20  # a hundred processes, of whose commands a part is kept
    finally:
        tracemalloc.stop()
    people.name({})
    gc.collect()
    assert len(Pretended.alive) == 0


def test_a_pid_of_the_host_never_gets_the_name_of_a_process_that_does_not_use_the_gpu(container: Path) -> None:
    with child() as process:
        opens(container, process.pid, "/dev/null", "/dev/nvidia0", "/dev/nvidiactl")  # as a monitor, without CUDA
        for place in (container, container / "without a namespace to compare"):
            named, note = People(place, own=dict).name(rows(process.pid, GONE))
            assert named["GPU-0"] == tuple(Process(pid, GIB, "compute") for pid in (process.pid, GONE))
            assert note == HOST_PIDS
    assert "--pid=host" in HOST_PIDS


def test_a_driver_that_gives_pids_of_the_container_is_believed(container: Path) -> None:
    with child() as process:
        opens(container, process.pid, "pipe:[17]", "/dev/nvidia-uvm")
        people = People(container, own=dict)
        named, note = people.name(rows(process.pid))
        assert named["GPU-0"][0].name
        assert note is None
    named, note = people.name(rows(process.pid))
    assert named["GPU-0"][0].name is None
    assert note is None  # it has ended, which is no sign of a host


@pytest.mark.parametrize("memory", [3 * GIB, None])
def test_the_only_row_is_this_process_where_it_holds_memory_of_that_gpu(container: Path, memory: int | None) -> None:
    people = People(container, own=lambda: {"GPU-0": 2 * GIB})
    for _ in range(2):
        named, note = people.name(rows(GONE, memory=memory))
        (mine,) = named["GPU-0"]
        assert (mine.pid, mine.memory, mine.ours) == (os.getpid(), memory, True)
        assert mine.name == psutil.Process().name()
        assert note is None
    assert mine.cpu is not None


def test_this_process_is_told_from_others_by_what_it_holds_at_least(container: Path) -> None:
    held = {"GPU-0": (Process(GONE, 9 * GIB, "compute"), Process(GONE + 1, GIB, "compute"))}
    named, note = People(container, own=lambda: {"GPU-0": 5 * GIB}).name(held)
    assert [(p.pid, p.ours) for p in named["GPU-0"]] == [(os.getpid(), True), (GONE + 1, False)]
    assert note == HOST_PIDS
    named, _ = People(container, own=lambda: {"GPU-0": GIB // 2}).name(held)
    assert not any(process.ours for process in named["GPU-0"])  # either may be it
    named, _ = People(container, own=lambda: {"GPU-1": 5 * GIB}).name(held)
    assert not any(process.ours for process in named["GPU-0"])


def test_no_second_row_is_taken_for_a_process_that_is_there_under_its_own_pid(container: Path) -> None:
    opens(container, os.getpid(), "/dev/nvidia-uvm")
    held = rows(os.getpid(), GONE, memory=8 * GIB)
    named, _ = People(container, own=lambda: {"GPU-0": GIB}).name(held)
    assert [(p.pid, p.ours) for p in named["GPU-0"]] == [(os.getpid(), True), (GONE, False)]


@pytest.mark.parametrize("error", [IndexError, RuntimeError, FileNotFoundError, UnicodeDecodeError])
def test_a_proc_that_psutil_cannot_parse(
    whole_machine: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise error(*(("utf-8", b"x", 0, 1, "no") if error is UnicodeDecodeError else ("not as it should be",)))

    monkeypatch.setattr(psutil, "Process", refuse)
    assert People(whole_machine).name(rows(7)) == ({"GPU-0": (Process(7, GIB, "compute"),)}, None)


def test_what_torch_holds_is_told_by_the_uuid_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_reserved=lambda index: (0, 7)[index],
        get_device_properties=lambda index: SimpleNamespace(uuid=f"uuid-{index}"),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert held_by_torch() == {"GPU-uuid-1": 7}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # type: ignore[arg-type]  # half imported
    assert held_by_torch() == {}
    code = "import sys; from hotloop.monitor.processes import held_by_torch as h; print(h(), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["{}", "False"]


def row(pid: int, memory: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


def test_lists_become_one_with_most_memory_first_whatever_a_broken_driver_puts_there() -> None:
    lists = {"compute": [row(1, 5), row(2, 9), row(3, None)], "graphics": [row(1, 5), row(4, 7)]}
    told = [(2, 9, "compute"), (4, 7, "graphics"), (1, 5, "both"), (3, None, "compute")]
    assert merged(lists, 100) == tuple(Process(*each) for each in told)
    assert merged({"compute": [row(1, 5), row(1, 6)]}, 100) == (Process(1, 11, "compute"),), "slices"
    assert merged({"compute": [row(1, 5), row(1, None)]}, 100) == (Process(1, None, "compute"),)
    odd = {"compute": [row(0, 5), row(2**32 - 1, 5), row(7, 0), row(8, 2**63)], "graphics": None}
    assert merged(odd, 100) == (Process(7, None, "compute"), Process(8, None, "compute"))
    assert merged({"compute": None, "graphics": None}, 100) is None
    assert merged({"compute": [], "graphics": None}, 100) == ()


@given(
    st.dictionaries(
        st.sampled_from(["compute", "graphics"]),
        st.none() | st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 50))),
    )
)
def test_every_process_is_in_the_list_once(lists: dict[str, list[tuple[int, int | None]] | None]) -> None:
    given = {kind: None if held is None else [row(*each) for each in held] for kind, held in lists.items()}
    holders = merged(given, 40)
    pids = {pid for held in lists.values() for pid, _ in held or () if pid}
    assert {holder.pid for holder in holders or ()} == pids
    assert len(holders or ()) == len(pids)
    assert all(holder.memory is None or holder.memory > 0 for holder in holders or ())
