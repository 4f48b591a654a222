"""`RoundingGuard`: repeats the gate while a plan rounds, and drops the levers that do not pass it any more."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hotloop.device.clock import Clock
from hotloop.errors import LossNotFinite
from hotloop.levers import Lever, without
from hotloop.tune.first_steps import FirstSteps
from hotloop.tune.gate import Departure, GradientGate, without_dropout
from hotloop.tune.knowledge import least_trusted
from hotloop.tune.spikes import JUMP, NormSpikes, Spike, SpikeDetector
from hotloop.tune.tuned_run import Ahead, Steps, TunedRun
from hotloop.tune.tuning_record import TuningRecord

T = TypeVar("T")
AUDITS = (100, 1000)  # batches of a plan after which the gate is asked again: one batch shows wiring, not divergence
MOST_PASSES = 8  # forward passes beyond one a step in a run; two more where something seems to have diverged
AUDIT_SHARE = 0.01  # of the rest of a run, which asking the gate again may take


class RoundingGuard:
    """For as long as levers round, losses and norms of the gradient are watched; where they jump, the gate is asked."""

    def __init__(
        self,
        run: TunedRun,
        first: FirstSteps,
        gate: GradientGate,
        record: TuningRecord,
        listen: Callable[[], None],
    ) -> None:
        """`listen` lets `has_loss_spiked` hear of losses from then on."""
        self._run, self._loop, self._first, self._gate, self._record = run, run.loop, first, gate, record
        self._listen = listen
        self._is_on = False  # while a lever rounds
        self._losses: SpikeDetector | None = None  # None on ranks: each sees other batches, and none decides by itself
        self._norms: NormSpikes | None = None
        self._spike: Spike | None = None  # that is to be looked into
        self._audits: list[int] = []  # batches before which the gate is asked in any case
        self._adopted_at: int | None = None  # batches after which this run has adopted a plan
        self._comparison = 0.0  # seconds that the first comparison with fp32 took

    @property
    def due(self) -> float:
        """The batch before which norms are looked at."""
        return math.inf if self._norms is None else self._norms.due

    def note_adoption(self, seconds: float) -> None:
        """Note that a plan was adopted now, after the gate, in so many seconds."""
        self._adopted_at, self._comparison = self._run.batches, seconds

    def begin(self) -> None:
        """Look for spikes where a lever rounds."""
        self.end()
        if not self._run.rounding():
            return
        self._is_on, done = True, self._run.batches
        if self._adopted_at is not None:
            self._audits = [self._adopted_at + number for number in AUDITS if self._adopted_at + number > done]
        if self._loop.ranks.size == 1:
            self._listen()
            self._losses = SpikeDetector()
            self._norms = NormSpikes(self._loop, done) if NormSpikes.is_possible(self._loop) else None

    def end(self) -> None:
        """Look for no spikes any more."""
        self._is_on, self._losses, self._norms, self._spike, self._audits = False, None, None, None, []

    def forget(self) -> None:
        """Begin anew with a plan that was found elsewhere."""
        self.end()
        self._adopted_at = None

    def has_norm_spiked(self) -> bool:
        """Call before each step; returns whether norms of the gradient have jumped."""
        spike = None if self._norms is None else self._norms.before(self._run.batches)
        self._spike = spike or self._spike
        return spike is not None

    def has_loss_spiked(self, loss: float) -> bool:
        """Note a recent loss that has reached the host; returns whether losses have jumped."""
        if self._losses is None or (jump := self._losses.jump(loss)) is None:
            return False
        self._losses = SpikeDetector(JUMP * self._losses.times)  # losses of this run jump, it seems
        self._spike = Spike(f"the loss is {jump:.0f} times its median")
        return True

    def repeated_in_fp32(self, run: Callable[[Any], T], batch: Any) -> T:
        """Run a step; where its loss is not finite and has not reached a weight, repeat the batch in fp32.

        A loss that is not finite in fp32 either raises `LossNotFinite`.
        """
        try:
            return run(batch)
        except LossNotFinite:
            old, rounding, memory = self._loop.step, self._run.rounding(), self._loop.memory
            if not rounding or self._loop.ranks.size > 1:  # other ranks do not repeat theirs
                raise
            memory.snapshot.restore()
            if not all(buffer.isfinite().all() for module in memory.modules for buffer in module.buffers()):
                raise  # a pass that was looked at closely no longer holds their old values
        self._loop.carry_out(without(rounding, old.plan), "the loss was not finite")
        for before, now in zip(old.eagers, self._loop.step.eagers, strict=True):
            now.window = before.window  # of which the gradients are there
        parts: Any = self._loop.step.run(batch)
        self._gate.passes += 1
        self._disable(rounding, "the loss is not finite with it, and is in fp32")
        return parts  # type: ignore[no-any-return]

    def watched(self) -> Steps[None]:
        """Repeat the gate, when due or after a spike, for as long as a lever rounds."""
        if not self._is_on:
            self.begin()
        while self._is_on and self._run.rounding() and self._may_ask(has_spiked=True):
            if self._spike is None:
                yield max(1, (self._audits[0] if self._audits else math.inf) - self._run.batches)
            spike, self._spike = self._spike, None
            if spike is not None:
                yield from self._audited(spike)
            elif self._audits and self._run.batches >= self._audits[0]:
                self._audits.pop(0)
                yield from self._audited(None)
        self.end()

    def _may_ask(self, *, has_spiked: bool) -> bool:
        """Whether a comparison with fp32 stays within the run's limit of extra forward passes."""
        cost = 2 * len(self._run.subject.objectives)
        if self._first.effects:
            return False
        return self._loop.ranks.largest(self._gate.passes) + cost <= MOST_PASSES + (cost if has_spiked else 0)

    def _audited(self, spike: Spike | None) -> Steps[None]:
        """Ask the gate again, and drop levers until it passes, the least trusted first."""
        ahead = yield from self._run.window()
        has_spiked = spike is not None
        if not self._may_ask(has_spiked=has_spiked) or (not has_spiked and self._costs_too_much(ahead)):
            return
        clock = Clock(self._run.subject.device)  # of the device: steps may be queued that it has not begun
        batch, is_dropped = ahead.example, False
        with without_dropout(self._run.subject.modules), self._loop.as_written() as step:
            plain = self._gate.gradients(step, batch)
        while rounding := self._run.rounding():
            why = self._loop.ranks.reason(self._departure(plain, batch, spike))
            if why is None:
                break
            doubtful = least_trusted(rounding) if self._may_ask(has_spiked=has_spiked) else rounding
            self._loop.carry_out(without(doubtful, self._loop.step.plan), why)
            self._disable(doubtful, why)
            is_dropped = True
        self._record.spend(clock.seconds())
        if is_dropped and rounding:
            self.begin()

    def _departure(self, plain: Any, batch: Any, spike: Spike | None) -> str | None:
        """Why the present plan has departed from fp32; None where it has not, or where nothing is told."""
        with without_dropout(self._run.subject.modules):
            other = self._gate.gradients(self._loop.step, batch)
            # There is no room, the person's code has failed, or fp32 does no better.
            failed = isinstance(plain, str) or isinstance(other, str)
            if failed or not all(loss.isfinite().all() for loss in plain[0].values()):
                return None
            if Departure.between(plain, other).has_jumped_too(math.inf if spike is None else spike.usual):
                return None
            why = self._gate.excess(plain, other, batch, later=True)
        return why if why is None or spike is None else f"{spike.words}, and {why}"

    def _costs_too_much(self, ahead: Ahead) -> bool:
        """Whether repeating the gate would take more than `AUDIT_SHARE` of the rest of the run."""
        tuning = self._record.tuning
        pace = None if tuning is None else tuning.step
        return ahead.left is not None and pace is not None and self._comparison > AUDIT_SHARE * ahead.left * pace

    def _disable(self, levers: Sequence[Lever], why: str) -> None:
        """Drop these levers for this run and, by the cache, for later ones."""
        for lever in levers:
            self._record.judge(lever, "dropped", why)
        if is_plain := not self._run.rounding():
            self.end()
        self._record.untimed()
        words = "back to fp32" if is_plain else f"without {', '.join(lever.name for lever in levers)}"
        self._record.say(f"{words} after {self._loop.step.counts.steps} steps: {why}")
