"""Whether processes have ended; one that is killed is there until the system has taken it apart."""

import time
from collections.abc import Iterable

import psutil


def gone(pids: Iterable[int], *, seconds: float = 20) -> bool:
    """Whether all of them end within so many seconds. One that has ended, and that nobody has asked about, counts."""
    left, deadline = set(pids), time.monotonic() + seconds
    while left := {pid for pid in left if _runs(pid)}:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
