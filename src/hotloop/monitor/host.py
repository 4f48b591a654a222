"""The computer around the GPUs: processor, memory, disks and network, as psutil tells."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from hotloop.monitor.foreign import decoded, or_none
from hotloop.monitor.reading import Host

CGROUP = Path("/sys/fs/cgroup")
SELDOM = 5.0  # seconds until swap is looked at again: it changes slowly, and is the costliest to ask for


@dataclass(frozen=True)
class Counters:
    """What only grows, at one moment."""

    time: float
    busy: float | None = None  # seconds of all cores
    whole: float | None = None  # busy or not
    read: float | None = None  # bytes
    written: float | None = None
    received: float | None = None
    sent: float | None = None


class Around:
    """Reads the host. Rates are differences to the reading before, so that the first one has none."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, cgroup: Path = CGROUP) -> None:
        self._clock, self._cgroup = clock, cgroup
        self._last: Counters | None = None
        self._swap: int | None = None
        self._swap_due = -float("inf")
        self._name = decoded(platform.node()) or None
        self._cores = or_none(psutil.cpu_count)

    def read(self) -> Host:
        last, now = self._last, self._counters()
        self._last = now
        used, total = self._memory()
        elapsed = None if last is None else now.time - last.time
        before = last or now
        return Host(
            name=self._name,
            cpu=_percent(_grown(before.busy, now.busy), _grown(before.whole, now.whole)),
            cores=self._cores,
            memory_used=used,
            memory_total=total,
            swap_used=self._swap_used(now.time),
            disk_read=_rate(before.read, now.read, elapsed),
            disk_written=_rate(before.written, now.written, elapsed),
            net_received=_rate(before.received, now.received, elapsed),
            net_sent=_rate(before.sent, now.sent, elapsed),
        )

    def _counters(self) -> Counters:
        cpu = or_none(psutil.cpu_times)
        # psutil's own care for counters that begin anew costs a quarter of the call; `_grown` takes it
        disk = or_none(lambda: psutil.disk_io_counters(nowrap=False))
        networks = or_none(lambda: psutil.net_io_counters(pernic=True, nowrap=False)) or {}
        outside = [counts for name, counts in networks.items() if name not in ("lo", "lo0")]  # not to itself
        whole = None if cpu is None else sum(cpu) - getattr(cpu, "guest", 0) - getattr(cpu, "guest_nice", 0)
        return Counters(
            self._clock(),
            # a core that waits for a disk could compute: it is idle; time of guests is in that of the users already
            busy=None if cpu is None or whole is None else whole - cpu.idle - getattr(cpu, "iowait", 0),
            whole=whole,
            read=None if disk is None else disk.read_bytes,
            written=None if disk is None else disk.write_bytes,
            received=sum(counts.bytes_recv for counts in outside) if outside else None,
            sent=sum(counts.bytes_sent for counts in outside) if outside else None,
        )

    def _memory(self) -> tuple[int | None, int | None]:
        """Used and whole main memory, or the share of a container that may have less of it."""
        memory = or_none(psutil.virtual_memory)
        if memory is None:
            return None, None
        limit, used = self._number("memory.max"), self._number("memory.current")
        if limit is None or used is None or limit >= memory.total:
            return int(memory.total - memory.available), int(memory.total)
        return max(0, used - self._cache()), limit

    def _swap_used(self, now: float) -> int | None:
        if now >= self._swap_due:
            swap = or_none(psutil.swap_memory)
            self._swap, self._swap_due = None if swap is None else int(swap.used), now + SELDOM
        return self._swap

    def _cache(self) -> int:
        """Bytes of files that the kernel drops when memory is needed, which a container's count includes."""
        try:
            lines = (self._cgroup / "memory.stat").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)

    def _number(self, name: str) -> int | None:
        try:
            text = (self._cgroup / name).read_text().strip()
        except OSError:
            return None
        return int(text) if text.isdecimal() else None  # "max" is no limit


def _grown(before: float | None, now: float | None) -> float | None:
    """How much a counter has grown; None where it was not known, or began anew."""
    return None if before is None or now is None or now < before else now - before


def _rate(before: float | None, now: float | None, elapsed: float | None) -> float | None:
    grown = _grown(before, now)
    return None if grown is None or not elapsed or elapsed < 0 else grown / elapsed


def _percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else min(100.0, 100 * part / whole)
