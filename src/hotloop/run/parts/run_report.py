"""What a run did, as it was measured."""

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hotloop.plan import Plan
from hotloop.records import PlanChange, is_of, restored
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.values.saved import Count, Saved, not_saved_there


class Reporting(Part):
    """Notes what there was when the run began, and the plans that it carried out."""

    name = "report"
    started: Saved[str]
    seconds: Saved[float] = 0.0
    tuning: Saved[float] = 0.0  # seconds in which plans were tried
    peak_memory: Saved[Count] = 0
    # Steps, skipped ones, batches and failures of earlier runs of the loop.
    before: Saved[tuple[Count, Count, Count, Count]]
    plans: Saved[list[PlanChange]]

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        core = run.core
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.before = (run.loop.steps, run.loop.skipped, core.watch.batches, run.loop.out_of_memory)
        self.plans = []
        self._noted = (
            len(core.switch.plans) - 1
        )  # plans of the loop up to the one that this part of the run begins with
        self._last, self._tuned = time.perf_counter(), core.tuner.record.seconds
        core.subject.backend.reset_peak_memory_stats()

    def report(self) -> Mapping[str, Any]:
        self._measure()
        run, loop = self.run, self.run.loop
        steps, skipped, first, failures = self.before
        return {
            "started": self.started,
            "seconds": self.seconds,
            "steps": loop.steps - steps,
            "skipped": loop.skipped - skipped,
            "interrupted": run.stop.asked and not (run.is_complete or run.stop.is_final),
            "curve": tuple((batch - first, loss) for batch, loss in run.core.watch.curve if batch > first),
            "peak_memory": self.peak_memory if run.core.subject.backend.tells_memory else None,
            "tuning": self.tuning,
            "out_of_memory": loop.out_of_memory - failures,
            "stopped": None if run.is_complete else run.stop.why,
            "watched": run.items,
            "plans": tuple(self.plans),
        }

    def state_dict(self) -> dict[str, Any]:
        self._measure()
        return super().state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        for change in state["plans"]:
            if not is_of(Plan, restored(Plan, change["plan"])):
                raise not_saved_there("report.plans")

    def after_load(self, state: Mapping[str, Any]) -> None:
        self.run.core.switch.note("that of the checkpoint")
        self._noted = len(self.run.core.switch.plans) - 1

    def _measure(self) -> None:
        """Add what was done since the last time to what was noted before, in earlier parts of the run too."""
        core, now = self.run.core, time.perf_counter()
        self.seconds, self._last = self.seconds + now - self._last, now
        self.tuning, self._tuned = self.tuning + core.tuner.record.seconds - self._tuned, core.tuner.record.seconds
        self.peak_memory = max(self.peak_memory, core.subject.backend.max_memory_allocated() or 0)
        core.switch.note("the step was changed while it ran")  # where many steps at once have not noted it yet
        steps, _, batches, _ = self.before
        for change in core.switch.plans[self._noted :]:
            if not self.plans or self.plans[-1].plan != change.plan:
                step, batch = max(0, change.step - steps), max(0, change.batch - batches)
                self.plans.append(replace(change, step=step, batch=batch))
        self._noted = len(core.switch.plans)
