"""`RankFile`: how far a rank is and how fast, in a file of this person alone, which `hotloop top` reads."""

import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from hotloop.ranks.group import Ranks
from hotloop.ranks.heartbeat import Beat
from hotloop.records.cache import cache_folder, make_private, why_foreign
from hotloop.records.files import write_json

FOLDER = "ranks"  # of the cache


class RankFile:
    """Each beat of a rank, with its pace; the file is there while the rank trains.

    `items` says how many it has trained on, and `pace` the seconds of an update: its own part, and that of waiting.
    """

    def __init__(self, ranks: Ranks, items: Callable[[], int], pace: Callable[[], tuple[float, float] | None]) -> None:
        self._ranks, self._items, self._pace = ranks, items, pace
        self._seen: deque[tuple[float, int]] = deque(maxlen=16)
        self._path = cache_folder(FOLDER) / f"{uuid4().hex}.json"

    def write(self, beat: Beat) -> None:
        """Write what a beat says; after the last one the file is gone."""
        if beat.ended:
            self._seen.clear()
            self._path.unlink(missing_ok=True)
            return
        self._seen.append((beat.time, self._items()))
        (start, before), (now, items) = self._seen[0], self._seen[-1]
        own, waited = self._pace() or (None, None)
        word = {
            "rank": beat.rank,
            "host": beat.host[:200],
            "device": str(self._ranks.device),
            "pid": beat.pid,
            "time": beat.time,
            "step": beat.progress[0],
            "line": beat.line[:200],
            "items_per_second": (items - before) / (now - start) if now > start else None,
            "own": own,
            "waited": waited,
        }
        run = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        program = Path(sys.argv[0]).name[:200] if sys.argv else ""
        make_private(self._path.parent)
        if why_foreign(self._path) is None:
            data = {"run": run[:200], "program": program, "ranks": self._ranks.size, "words": [word]}
            write_json(self._path, data, mode=0o600, sync=False)
