"""`CaptureWarmUp`: the real steps before a capture, and what is seen in them."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from hotloop.placement.waits import waits
from hotloop.step.captured_graph import WARM_UP, CaptureStream, Rates, renew_accumulation
from hotloop.step.constants import made_on_device
from hotloop.step.eager import Parts
from hotloop.step.eager_calls import EagerCalls, watching
from hotloop.step.frozen import Frozen
from hotloop.step.inspection import Inspection, Looks, inspected, signature
from hotloop.values.reach import kept_by_capture, look


class CaptureWarmUp:
    """Trains on the capture stream, where libraries prepare themselves; two steps or more are inspected, the last is a
    rehearsal. Then the step `is_ready`, or `abandon` got the reason why it cannot be captured.
    """

    def __init__(self, calls: EagerCalls, side: CaptureStream, frozen: Frozen, abandon: Callable[[str], None]) -> None:
        self.looks = Looks()
        self.is_ready = False  # whether the step has run a few times and was seen to do the same work
        self._calls, self._side, self._frozen, self._abandon = calls, side, frozen, abandon
        self._limit = calls.limit
        self._done = 0
        self._has_waited = False  # in a rehearsal

    @property
    def is_sized(self) -> bool:
        """Whether the size of micro-batches is still that of the inspected steps."""
        return self._calls.limit == self._limit

    def __call__(self, batch: Any) -> Parts:
        """A real step."""
        calls = self._calls
        if not self._done:
            renew_accumulation(p for eager in calls.eagers for p in eager.trained.parameters)
            if not calls.is_compiled and calls.memory is not None and calls.memory.snapshot.has_seen_passes:
                self._done = 1  # by steps of another plan, or of before they were captured anew
        self._done += 1
        self.is_ready = self._done > WARM_UP
        with self._side.running():
            if self._done in (WARM_UP - 1, WARM_UP):
                parts = self.inspect(batch)
            else:  # with rates on the device only where the person's code was seen to leave them alone
                parts = self._rehearse(batch) if self.is_ready else calls.run(batch)
        if self.is_sized and self._done == WARM_UP:
            if not self.looks.are_enough:
                self._done -= 1  # the next step is inspected, too
            elif why := self.looks.objection():
                self._abandon(why)
        return parts

    def inspect(self, batch: Any) -> Parts:
        """A real step whose operations and effects are noted."""
        calls, seen = self._calls, Inspection(form=signature(batch))
        self.looks.made.append(seen)
        self._frozen.note_hooks()
        before = look(calls.roots(), kept_by_capture, hold=True)
        with watching(calls.eagers, partial(inspected, calls.device, seen)):
            parts = calls.run(batch)
        seen.compare(before, look(calls.roots(), kept_by_capture, hold=True))
        return parts

    def _rehearse(self, batch: Any) -> Parts:
        """Run the step as it will be captured, with learning rates on the device, and check that it does not block."""
        calls = self._calls
        rates, updates = Rates(calls.optimizers, 1, calls.device), calls.eagers[0].phase[1]
        inside = nullcontext() if calls.is_compiled else watching(calls.eagers, made_on_device)
        with ExitStack() as around:
            for eager in calls.eagers:  # a schedule must not write to rates that are restored below
                around.enter_context(eager.update.without_schedules())
            seen = around.enter_context(waits(calls.device))
            around.enter_context(rates.of_step(0))
            around.enter_context(inside)
            parts = calls.run(batch)
        if updates:
            calls.advance_schedules()
        if self.is_sized and len(seen) > seen.in_packages:
            if self._has_waited:
                self._abandon(f"the host waits for the device: {seen}")
            self._has_waited, self.is_ready, self._done = True, False, WARM_UP  # once is no reason
        return parts
