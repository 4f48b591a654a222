"""The host: real numbers of this machine, rates that are differences, and nothing that raises."""

import socket
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hotloop.monitor.host import SELDOM, Around
from hotloop.monitor.reading import Host

from .fakes import Clock

GIB = 2**30


def test_this_machine(tmp_path: Path) -> None:
    around = Around(root=tmp_path)  # where no share of a container is written
    first = around.read()
    sum(range(2_000_000))  # some time of the processor
    second = around.read()
    assert first.name == socket.gethostname()
    assert first.cores == psutil.cpu_count()
    assert first.memory_total == psutil.virtual_memory().total
    assert first.memory_used is not None
    assert 0 < first.memory_used < first.memory_total
    assert second.cpu is None or 0 <= second.cpu <= 100


def test_swap_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    told = SimpleNamespace(used=7)
    monkeypatch.setattr(psutil, "swap_memory", lambda: told)
    around = Around(clock=clock)
    assert around.read().swap_used == 7
    told.used = 9
    clock.now += SELDOM
    assert around.read().swap_used == 9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What psutil counts, in the hands of a test."""
    told = SimpleNamespace(
        cpu=SimpleNamespace(idle=100.0, iowait=50.0, user=50.0),
        disk=SimpleNamespace(read_bytes=1000, write_bytes=2000),
        net={"lo": _traffic(10**9), "eth0": _traffic(100), "eth1": _traffic(0)},
    )

    class Times(tuple[float, ...]):
        idle = property(lambda self: told.cpu.idle)
        iowait = property(lambda self: told.cpu.iowait)

    monkeypatch.setattr(psutil, "cpu_times", lambda: Times((told.cpu.user, told.cpu.idle, told.cpu.iowait)))
    monkeypatch.setattr(psutil, "disk_io_counters", lambda nowrap: told.disk)
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic, nowrap: told.net)
    return told


def _traffic(count: int) -> SimpleNamespace:
    return SimpleNamespace(bytes_recv=count, bytes_sent=2 * count)


def test_rates_are_differences_over_the_time_between(machine: SimpleNamespace, clock: Clock) -> None:
    around = Around(clock=clock)
    first = around.read()
    assert (first.cpu, first.disk_read, first.disk_written, first.net_received, first.net_sent) == (None,) * 5
    clock.now += 4
    machine.cpu = SimpleNamespace(idle=101.0, iowait=51.0, user=56.0)  # of 8 seconds of cores, 2 were idle
    machine.disk = SimpleNamespace(read_bytes=1400, write_bytes=2000)
    machine.net = {"lo": _traffic(10**12), "eth0": _traffic(140), "eth1": _traffic(40)}
    host = around.read()
    assert host.cpu == 75
    assert (host.disk_read, host.disk_written) == (100, 0)
    assert (host.net_received, host.net_sent) == (20, 40)  # not what the machine sends to itself


def test_a_counter_that_begins_anew_or_time_that_stands_still_gives_no_rate(
    machine: SimpleNamespace, clock: Clock
) -> None:
    around = Around(clock=clock)
    around.read()
    assert around.read().disk_read is None
    clock.now += 1
    machine.disk = SimpleNamespace(read_bytes=0, write_bytes=2500)
    machine.net = {"eth1": _traffic(0)}  # eth0 has gone
    host = around.read()
    assert (host.disk_read, host.disk_written) == (None, 500)
    assert (host.net_received, host.net_sent) == (None, None)
    machine.disk, machine.net = None, {}
    host = around.read()
    assert (host.disk_read, host.disk_written, host.net_received, host.net_sent) == (None,) * 4


@pytest.mark.parametrize("error", [OSError, PermissionError, FileNotFoundError, ValueError, IndexError, RuntimeWarning])
def test_nothing_that_psutil_raises_gets_out(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], tmp_path: Path
) -> None:
    def refuse(**_: Any) -> None:
        raise error("/proc is not as it should be")

    for name in ("cpu_times", "cpu_count", "disk_io_counters", "net_io_counters", "virtual_memory", "swap_memory"):
        monkeypatch.setattr(psutil, name, refuse)
    around = Around(root=tmp_path)
    around.read()
    host = around.read()
    assert [f.name for f in fields(Host) if f.name != "name" and getattr(host, f.name) is not None] == []


def test_memory_is_the_share_of_a_container_where_it_has_one(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in {"max": f"{GIB}\n", "current": "600\n", "stat": "anon 5\ninactive_file 200\n"}.items():
        (group / f"memory.{name}").write_text(text)
    host = Around(root=tmp_path).read()
    assert (host.memory_used, host.memory_total) == (400, GIB)
