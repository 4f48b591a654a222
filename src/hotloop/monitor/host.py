"""The computer around the GPUs: processor, memory, disks and network, as psutil tells."""

import platform
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from hotloop.monitor.foreign import decoded, or_none
from hotloop.monitor.main_memory import machine_memory
from hotloop.monitor.reading import Host

SELDOM = 5.0  # seconds until swap is looked at again: it changes slowly, and is the costliest to ask for


class Around:
    """Reads the host. Rates are differences to the reading before, so that the first one has none."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, root: Path = Path("/")) -> None:
        self._clock, self._root = clock, root
        self._last: dict[str, float | None] = {}
        self._swap: int | None = None
        self._swap_due = -float("inf")
        self._name = decoded(platform.node()) or None
        self._cores = or_none(psutil.cpu_count)

    def read(self) -> Host:
        last, self._last = self._last, self._counters()
        grown = {name: _grown(last.get(name), count) for name, count in self._last.items()}
        elapsed, busy, whole = (grown.pop(name) for name in ("elapsed", "busy", "whole"))
        free, total = or_none(lambda: machine_memory(self._root)) or (None, None)
        return Host(
            name=self._name,
            cpu=None if busy is None or not whole else min(100.0, 100 * busy / whole),
            cores=self._cores,
            memory_used=None if total is None or free is None else total - free,
            memory_total=total,
            swap_used=self._swap_used(),
            **{name: None if count is None or not elapsed else count / elapsed for name, count in grown.items()},
        )

    def _counters(self) -> dict[str, float | None]:
        """What only grows: seconds, those of all cores, and bytes."""
        cpu = or_none(psutil.cpu_times)
        # psutil's own care for counters that begin anew costs a quarter of the call; `_grown` takes it
        disk = or_none(lambda: psutil.disk_io_counters(nowrap=False))
        networks = or_none(lambda: psutil.net_io_counters(pernic=True, nowrap=False)) or {}
        outside = [counts for name, counts in networks.items() if name not in ("lo", "lo0")]  # not to itself
        whole = None if cpu is None else sum(cpu) - getattr(cpu, "guest", 0) - getattr(cpu, "guest_nice", 0)
        return {
            "elapsed": self._clock(),
            # a core that waits for a disk could compute: it is idle; time of guests is in that of the users already
            "busy": None if cpu is None or whole is None else whole - cpu.idle - getattr(cpu, "iowait", 0),
            "whole": whole,
            "disk_read": None if disk is None else disk.read_bytes,
            "disk_written": None if disk is None else disk.write_bytes,
            "net_received": sum(counts.bytes_recv for counts in outside) if outside else None,
            "net_sent": sum(counts.bytes_sent for counts in outside) if outside else None,
        }

    def _swap_used(self) -> int | None:
        if self._clock() >= self._swap_due:
            swap = or_none(psutil.swap_memory)
            self._swap, self._swap_due = None if swap is None else int(swap.used), self._clock() + SELDOM
        return self._swap


def _grown(before: float | None, now: float | None) -> float | None:
    """How much a counter has grown; None where it was not known, or began anew."""
    return None if before is None or now is None or now < before else now - before
