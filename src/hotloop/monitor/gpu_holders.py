"""The processes that hold memory of a GPU, as the driver counts them."""

from collections.abc import Iterable, Mapping
from typing import Any

from hotloop.monitor.reading import Process

NOBODY = (0, 0xFFFFFFFF)  # PIDs that some drivers put where they have none to tell


def merged(lists: Mapping[str, Iterable[Any] | None], total: int | None) -> tuple[Process, ...] | None:
    """One nameless process for each row of the lists by kind, with most memory first; None where none is known.

    The same process may be in both lists, with the same memory, and more than once in one of them, with a part of
    it for each slice of a GPU that is cut in slices (MIG).
    """
    if all(rows is None for rows in lists.values()):
        return None
    held: dict[int, dict[str, list[int | None]]] = {}
    for kind, rows in lists.items():
        for row in rows or ():
            if row.pid not in NOBODY:
                held.setdefault(int(row.pid), {}).setdefault(kind, []).append(_memory(row, total))
    holders = (
        Process(pid, _all(kinds), "both" if len(kinds) > 1 else next(iter(kinds))) for pid, kinds in held.items()
    )
    return tuple(sorted(holders, key=lambda holder: (-(holder.memory or 0), holder.pid)))


def _memory(row: Any, total: int | None) -> int | None:
    """None on WSL and often on MIG. A process that holds a GPU holds some of it, so that 0 means nothing was told."""
    used = row.usedGpuMemory
    return None if not used or (total is not None and used > total) else int(used)


def _all(kinds: Mapping[str, list[int | None]]) -> int | None:
    sums = [sum(known) for parts in kinds.values() if len(known := [p for p in parts if p is not None]) == len(parts)]
    return max(sums, default=None)
