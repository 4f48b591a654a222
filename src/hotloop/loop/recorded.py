"""`Recorded`: the steps of batches of one form as CUDA graphs, one for each place that a batch has in its window."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotloop.loop.graph import CannotCapture, Rates, Recording
from hotloop.placement import map_tensors, tensors_in

if TYPE_CHECKING:
    from hotloop.loop.step import Gradients, Parts, Step


class Recorded:
    """What a step has recorded of single batches, and how a batch goes through it."""

    def __init__(self, step: "Step") -> None:
        self.gradients: Gradients = []  # that the recordings write
        self._step = step
        self._recordings: dict[tuple[bool, bool], Recording] = {}  # by phase: first of its window, last of it
        self._static: Any = None  # the batch that the recordings read

    def __bool__(self) -> bool:
        return bool(self._recordings)

    def __call__(self, batch: Any) -> "Parts":
        """Train on one batch by a recording, which is made where it is missing; plainly where that cannot be."""
        step, update = self._step, self._step.update
        phase = update.phase
        if not self._can_join(phase):
            step.point(self.gradients)
            return step.run(batch, step.compiled)
        recording = self._recordings.get(phase) or self._record_or_not(batch, phase)
        if recording is None:
            return step.run(batch, step.compiled)
        if name := self._rates.changed():
            step.give_up(f"the optimizer's {name} changes while it runs, which a recording would freeze")
            return step.run(batch, step.compiled)
        torch._foreach_copy_(self._buffers, [tensor for _, tensor in tensors_in(batch)])
        self._rates.send([self._rates.now()])
        step.replay(recording)
        static, count = recording.result
        parts = {name: value.clone() for name, value in static.items()}  # the next replay writes over these
        step.replayed(parts, count.clone() if isinstance(count, Tensor) else count, updated=phase[1])
        return parts

    def _record_or_not(self, batch: Any, phase: tuple[bool, bool]) -> Recording | None:
        step = self._step
        try:
            return self._record(batch, phase)
        except Exception as error:
            failure, why = step.want_of_memory(error), str(error)
            if failure is None and not isinstance(error, CannotCapture):
                raise
        if not step.record_less(failure, step.update.weighing.items_in(batch)):
            step.give_up(why)
        return None

    def _can_join(self, phase: tuple[bool, bool]) -> bool:
        """Whether a recording may take the next batch: its window must hold only batches like it, from the first."""
        if not self._recordings:
            return phase[0]
        return self._step.update.is_even()

    def _record(self, batch: Any, phase: tuple[bool, bool]) -> Recording:
        step = self._step
        if self._static is None:
            self._static = map_tensors(batch, torch.clone)
            self._buffers = [tensor for _, tensor in tensors_in(self._static)]
            self._rates = Rates(step.optimizers, 1, step.device)
            self._rates.send([self._rates.now()])

        def work() -> "tuple[Parts, int | Tensor]":
            with self._rates.of_step(0):
                return step.compute_unwatched(self._static)

        recording = step.recording_of(work, afresh=phase[0])
        if phase[0]:
            self.gradients = recording.gradients
        self._recordings[phase] = recording
        return recording
