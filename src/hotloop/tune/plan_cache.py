"""`Cache`: tunings that were found before, one file each."""

import json
import warnings
from contextlib import suppress
from pathlib import Path

from hotloop.errors import OutputError, PlanWarning
from hotloop.files.cache import cache_folder, make_private, why_foreign
from hotloop.files.whole import write_json
from hotloop.levers import LEVERS, MOST_STEPS, pulled_levers
from hotloop.plan import Plan, Tuning


class Cache:
    """Plans of earlier runs, one file each; files that cannot be read or written are ignored."""

    LARGEST = 1 << 20  # bytes of a file; what is larger is not of ours

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        with suppress(RuntimeError, ValueError, OSError):  # nobody knows where home is
            self._folder = folder or cache_folder("plans")

    def get(self, key: str, begin: Plan | None = None) -> Tuning | None:
        """The tuning under a key, if its plan agrees with `begin` in the settings that tuning leaves alone."""
        if self._folder is None:
            return None
        path = self._folder / f"{key}.json"
        with suppress(
            OSError, ValueError, TypeError, KeyError, AttributeError, LookupError, RecursionError, MemoryError
        ):
            if path.is_file() and path.stat().st_size <= self.LARGEST and self._is_ours(path):
                tuning = Tuning.from_json(json.loads(path.read_text(encoding="utf-8")))
                return tuning if self._is_usable(tuning, begin or tuning.plan) else None
        return None

    def put(self, key: str, tuning: Tuning) -> None:
        if self._folder is not None:
            path = self._folder / f"{key}.json"
            with suppress(OutputError, OSError, ValueError):
                make_private(self._folder)
                if self._is_ours(path):
                    write_json(path, tuning.to_json(), mode=0o600)

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

    def _is_usable(self, tuning: Tuning, begin: Plan) -> bool:
        """Whether a tuning from a file is sound and has the settings of `begin`."""
        if not tuning.is_sound() or any(trial.gain is not None and trial.gain <= 0 for trial in tuning.trials):
            return False
        plan, own = tuning.plan, ("device", "accumulate", "clip_norm", "clip_value", "micro_batch", "workers")
        if any(getattr(plan, name) != getattr(begin, name) for name in (*own, "recompute", "memory_budget")):
            return False
        on_cuda, levers = plan.device.startswith("cuda"), pulled_levers(plan)
        known = all(lever in LEVERS and (on_cuda or not lever.needs_cuda) for lever in levers)
        return known and 0 <= plan.graph <= MOST_STEPS
