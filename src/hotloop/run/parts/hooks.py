"""The person's functions that are called after steps and epochs, and may end the run."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from hotloop.levers.flags import fused_steps
from hotloop.records import Epoch
from hotloop.run.callbacks import EpochRecord, StepRecord, asks_to_stop
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part


class Hooks(Part):
    """Calls `on_step` and `on_epoch`."""

    name = "hooks"
    after = ("schedule", "best")

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._on_step, self._on_epoch = asked.hooks.on_step, asked.hooks.on_epoch
        self.needs_epochs_now = bool(self._on_epoch)  # which sees the weights of its epoch, and may change the next one
        self._latest: StepRecord | None = None
        if not self._on_step:
            self.idle = ("after_step",)

    def begin_epoch(self) -> None:
        self._latest = None

    def after_step(self, loss: Tensor | None, batches: int) -> None:
        if self._on_step and loss is not None:
            run = self.run
            self._latest = StepRecord(run.core.switch.step.counts.steps, run.epoch + 1, run.batches, loss, run.loop)
            self._ask(self._on_step, self._latest, "on_step")

    def after_batches(self) -> None:
        """The end of an epoch updates with a short window."""
        if self._latest is not None and self._latest.step != self.run.loop.steps:
            self._latest.step = self.run.loop.steps
            self._ask(self._on_step, self._latest, "on_step")

    def epoch_done(self, epoch: Epoch) -> None:
        self._ask(self._on_epoch, EpochRecord(epoch, self.run.loop.steps, self.run.loop), "on_epoch")

    def _ask(self, hooks: Sequence[Callable[[Any], object]], record: Any, name: str) -> None:
        core = self.run.core
        is_fused = bool(hooks) and core.switch.step.plan.fused
        try:
            with fused_steps(core.subject.optimizers, by_hand=True) if is_fused else nullcontext():
                stops = asks_to_stop(hooks, record, name)
        except RuntimeError as error:
            if core.switch.plan.channels_last and "view size is not compatible" in str(error):
                error.add_note(
                    "hotloop: the plan has the weights of convolutions in channels_last, which view cannot flatten\n"
                    f'  fix: use reshape in {name}, or Loop(…, plan="plain") if that is not your code'
                )
            raise
        if stops:
            self.run.stop.ask(name)
