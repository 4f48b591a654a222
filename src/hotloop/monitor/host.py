"""The computer around the GPUs: processor, memory, disks and network, as psutil tells; words from outside."""

import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hotloop.monitor.main_memory import machine_memory
from hotloop.monitor.reading import Host

T = TypeVar("T")
LONGEST_COMMAND = 4096  # characters of a command line that are kept; the kernel allows megabytes
SURROGATES = re.compile(r"[\ud800-\udfff]")  # how Python writes bytes that are no UTF-8; no file or page takes them
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


def decoded(answer: Any) -> str | None:
    """The text of an answer, with what cannot be decoded replaced; old bindings answer in bytes.

    >>> decoded(b"NVIDIA H200"), decoded("caf" + chr(0xDCE9))
    ('NVIDIA H200', 'caf�')
    """
    if answer is None:
        return None
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
    text = SURROGATES.sub("\ufffd", text)
    return text if len(text) <= LONGEST_COMMAND else f"{text[: LONGEST_COMMAND - 1]}…"


def or_none(ask: Callable[[], T]) -> T | None:
    """What psutil tells, or None: a process has ended or may not be asked, or a sandbox lacks files of /proc."""
    try:
        return ask()
    except Exception:  # noqa: BLE001  # besides its own errors, psutil passes on those of parsing a sandbox's /proc
        return None
