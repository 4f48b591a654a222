"""Spikes of losses and of gradient norms: signs that a run diverges."""

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass

from hotloop.device.backend import backend_of
from hotloop.step.norms import HasStep, NormReader

JUMP = 10.0  # times their median that losses or norms are when they have jumped
FIRST_LOOK, MOST_BETWEEN_LOOKS = 25, 500  # batches up to the first look at a norm, and at most from one to the next
LOOKS_SHARE = 0.001  # of the time of a run on a GPU, which looks may take of the host
GUESS = 1e-3  # seconds of a look before a second one: in the first, libraries load what they had no need of before
LATER = 10  # batches until the host asks again for a norm that was still on its way


@dataclass(frozen=True)
class Spike:
    """Losses or gradient norms that have jumped."""

    words: str
    usual: float = math.inf  # the most that is no jump of norms


class SpikeDetector:
    """Recent numbers, such as losses, and whether they have jumped.

    `times` their median is a jump, where so many come `in_a_row`. The median is made of `least` numbers or more, and
    `kept` at most; anew after `new` of them.
    """

    def __init__(
        self, times: float = JUMP, *, least: int = 20, kept: int = 100, new: int = 10, in_a_row: int = 3
    ) -> None:
        self.times = times
        self.usual = math.inf  # the most that is no jump
        self._numbers: deque[float] = deque(maxlen=kept)
        self._least, self._every, self._in_a_row = least, new, in_a_row
        self._high = 0  # numbers in a row that are more
        self._new = 0  # numbers since the median was made

    @property
    def is_high(self) -> bool:
        """Whether the last number was unusually high."""
        return self._high > 0

    def jump(self, number: float) -> float | None:
        """Note a number; returns its multiple of the median once enough in a row were high, else None.

        >>> losses = SpikeDetector()
        >>> [times for loss in [2.0] * 30 + [50.0] * 3 + [2.0] if (times := losses.jump(loss)) is not None]
        [25.0]
        """
        size = abs(number)
        if size > self.usual:
            self._high += 1
            return None if self._high < self._in_a_row else self.times * size / self.usual
        self._high = 0
        self._numbers.append(size)
        self._new += 1
        if self._new >= self._every and len(self._numbers) >= self._least:  # not each time: a step may take 50 µs
            self._new, self.usual = 0, self.times * statistics.median(self._numbers) or math.inf
        return None


class NormSpikes:
    """Samples the gradient norm of the last step, and tells where norms have jumped.

    A look comes after 25 batches, 50, 100, 200, 400, 800 and then every 500: on a CPU no clock decides, so that a run
    can be repeated. On a GPU there are fewer, where steps are so short that looks would take the host more than a
    thousandth of the time. After a norm that is high, the next step is looked at.
    """

    def __init__(self, loop: HasStep, done: int) -> None:
        """`done` batches have been trained on."""
        self.due: float = done + FIRST_LOOK  # the batch before which it looks
        self._loop, self._reader = loop, NormReader(loop)
        self._jumps = _jumps(JUMP)
        self._is_timed = not backend_of(loop.step.device).is_host
        self._begin = self._looked = done  # the batches of its beginning and of its last look
        self._last, self._cost = time.perf_counter(), GUESS  # when that was, and the seconds that one takes
        self._is_first = True  # look
        self._flies = False  # whether a norm is on its way
        self._fails = False

    @staticmethod
    def is_possible(loop: HasStep) -> bool:
        """Whether a step leaves its gradient or the norm of it, and there is one objective."""
        step, backend = loop.step, backend_of(loop.step.device)
        return (
            len(step.eagers) == 1
            and (
                backend.is_host or backend.non_blocking
            )  # where a number can come to the host without a synchronization
            and NormReader(loop).knows_without_asking
        )

    def before(self, done: int) -> Spike | None:
        """Call before each step: samples where that is due; returns a spike where norms have jumped."""
        if done < self.due:
            return None
        start = time.perf_counter()
        if not self._flies:
            if self._is_timed and not self._jumps.is_high and start - self._last < self._cost / LOOKS_SHARE:
                self.due = done + max(FIRST_LOOK, done - self._looked)  # as many again
                return None
            if not self._loop.step.is_between_windows:
                self.due = done + 1
                return None
            self._looked, self._last, self._cost = done, start, GUESS if self._is_first else 0.0
        norm = self.now()
        self._cost += 0.0 if self._is_first else time.perf_counter() - start
        if norm is None and self._flies:
            self.due = done + LATER
            return None
        self._is_first = False
        spike = None if norm is None else self._spike_in(norm)
        self.due = done + (1 if self._jumps.is_high else min(max(FIRST_LOOK, done - self._begin), MOST_BETWEEN_LOOKS))
        self.due = math.inf if self._fails else self.due
        return spike

    def _spike_in(self, norm: float) -> Spike | None:
        jumps = self._jumps
        if (jump := jumps.jump(norm)) is None:
            return None
        self._jumps = _jumps(JUMP * jumps.times)  # norms of this run jump, it seems
        return Spike(f"the norm of the gradient is {jump:.0f} times its median", jumps.usual)

    def now(self) -> float | None:
        """The norm of the last step or of the last sample; None where it is not known yet."""
        try:
            self._flies = self._flies or self._reader.note()
            norms = self._reader.read()
        except Exception:  # noqa: BLE001  # what only watches must not end a run: no memory, tensors without a norm
            self._flies, self._fails = False, True
            return None
        if not norms:
            return None
        self._flies = False
        (norm,) = norms.values()
        if math.isfinite(norm):
            return norm
        return None if self._loop.step.plan.precision == "fp16" else math.inf  # of which the scaler skips the update


def _jumps(times: float) -> SpikeDetector:
    """Of norms: few, since those of the first steps are large; two in a row, since single batches have high ones."""
    return SpikeDetector(times, least=5, kept=9, new=1, in_a_row=2)
