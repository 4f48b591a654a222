"""Copies and waits of a simulation, by line."""

from collections import Counter
from pathlib import Path

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Listener
from hotloop.apps.simulate.findings import relative
from hotloop.apps.simulate.simulation_record import Copy, Sync
from hotloop.placement.sites import Site

CONTEXT = 500 << 20  # bytes of a CUDA context, where no model of memory knows better


class Syncs(Listener):
    """A listener that counts copies and waits, and how much memory is live where no model of memory listens."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._copies: Counter[tuple[Site | None, str, bool, bool]] = Counter()
        self._bytes: Counter[tuple[Site | None, str, bool, bool]] = Counter()
        self._waits: Counter[tuple[Site | None, str]] = Counter()
        self._sizes: dict[int, int] = {}
        self._live = 0
        self._most = 0

    def allocated(self, key: int, size: int, kind: str) -> None:
        rounded = -(-size // 512) * 512
        self._sizes[key] = rounded
        self._live += rounded
        self._most = max(self._most, self._live)

    def freed(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)

    def copied(self, size: int, direction: str, *, pinned: bool, blocking: bool, place: Site | None) -> None:
        key = (place, direction, pinned, blocking)
        self._copies[key] += 1
        self._bytes[key] += size

    def waited(self, kind: str, place: Site | None) -> None:
        self._waits[place, kind] += 1

    def memory_stats(self) -> dict[str, int]:
        """As `torch.cuda.memory_stats` names it."""
        return {
            "allocated_bytes.all.current": self._live,
            "allocated_bytes.all.peak": self._most,
            "reserved_bytes.all.current": self._live,
            "reserved_bytes.all.peak": self._most,
        }

    def mem_get_info(self) -> tuple[int, int]:
        return max(self._card.memory - CONTEXT - self._live, 0), self._card.memory

    def reset_peak_memory_stats(self) -> None:
        self._most = self._live

    def reset_accumulated_memory_stats(self) -> None: ...

    def set_per_process_memory_fraction(self, fraction: float) -> None: ...

    def empty_cache(self) -> None: ...

    def set_allocator_settings(self, words: str) -> None: ...

    def copies(self, folder: Path) -> tuple[Copy, ...]:
        """Copies by line, in the order in which they first came."""
        found = []
        for key, count in self._copies.items():
            place, direction, pinned, blocking = key
            found.append(Copy(*_line(place, folder), direction, self._bytes[key], pinned, blocking, count))
        return tuple(found)

    def syncs(self, folder: Path) -> tuple[Sync, ...]:
        """Waits by line."""
        return tuple(Sync(*_line(place, folder), kind, count) for (place, kind), count in self._waits.items())


def _line(place: Site | None, folder: Path) -> tuple[str, int]:
    return (relative(place.file, folder), place.line) if place is not None else ("", 0)
