"""`DroppedLevers`: the levers that did not work for a model in earlier runs, one file for each model."""

import json
import warnings
from contextlib import suppress
from pathlib import Path

from hotloop.errors import OutputError, PlanWarning
from hotloop.records.cache import cache_folder, make_private, why_foreign
from hotloop.records.files import write_json


class DroppedLevers:
    """Levers with the reason why they were dropped; files that cannot be read or written are ignored."""

    LARGEST = 1 << 20  # bytes of a file; what is larger is not of ours

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        with suppress(RuntimeError, ValueError, OSError):  # nobody knows where home is
            self._folder = folder or cache_folder("plans")

    def get(self, key: str) -> dict[str, str]:
        """The levers under a key, each with the reason."""
        if self._folder is not None:
            path = self._folder / f"{key}.json"
            with suppress(OSError, ValueError, RecursionError, MemoryError):
                if path.is_file() and path.stat().st_size <= self.LARGEST and self._is_ours(path):
                    found = json.loads(path.read_text(encoding="utf-8"))
                    if isinstance(found, dict) and all(isinstance(why, str) for why in found.values()):
                        return found
        return {}

    def put(self, key: str, levers: dict[str, str]) -> None:
        if self._folder is not None:
            path = self._folder / f"{key}.json"
            with suppress(OutputError, OSError, ValueError):
                make_private(self._folder)
                if self._is_ours(path):
                    write_json(path, levers, mode=0o600)

    def _is_ours(self, path: Path) -> bool:
        why = why_foreign(path)
        if why is not None:
            warnings.warn(
                f"{why}, so plans are neither read nor kept there: set HOTLOOP_CACHE to a folder of your own, or "
                f"`chmod -R go-w {path.parent.parent}` where nobody else uses it",
                PlanWarning,
                stacklevel=2,
            )
        return why is None
