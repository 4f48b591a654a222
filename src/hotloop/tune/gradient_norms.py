"""`NormWatch`: samples gradient norms, without synchronization, in a run whose plan changes rounding."""

import math
import time

from hotloop.step.norms import HasStep, NormReader
from hotloop.tune.gate import JUMP, Jumps, Sign

FIRST_LOOK, MOST_BETWEEN_LOOKS = 25, 500  # batches up to the first look, and at most from one to the next
LOOKS_SHARE = 0.001  # of the time of a run on a GPU, which looks may take of the host
GUESS = 1e-3  # seconds of a look before a second one: in the first, libraries load what they had no need of before
LATER = 10  # batches until the host asks again for a norm that was still on its way
LEAST, KEPT = 5, 9  # norms that make a median, and that it is of at most: those of the first steps are large
IN_A_ROW = 2  # norms that are high where they have jumped: those of single batches are in sound runs, too


class NormWatch:
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
        self._is_timed = loop.step.device.type != "cpu"
        self._begin = self._looked = done  # the batches of its beginning and of its last look
        self._last, self._cost = time.perf_counter(), GUESS  # when that was, and the seconds that one takes
        self._is_first = True  # look
        self._flies = False  # whether a norm is on its way
        self._fails = False

    @staticmethod
    def is_possible(loop: HasStep) -> bool:
        """Whether a step leaves its gradient or the norm of it, and there is one objective."""
        step = loop.step
        return (
            len(step.eagers) == 1
            and step.device.type in ("cpu", "cuda")  # where a number can come to the host without a synchronization
            and NormReader(loop).knows_without_asking
        )

    def before(self, done: int) -> Sign | None:
        """Call before each step: samples where that is due; returns a sign where norms have jumped."""
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
        sign = None if norm is None else self._sign_of(norm)
        self.due = done + (1 if self._jumps.is_high else min(max(FIRST_LOOK, done - self._begin), MOST_BETWEEN_LOOKS))
        self.due = math.inf if self._fails else self.due
        return sign

    def _sign_of(self, norm: float) -> Sign | None:
        jumps = self._jumps
        if (jump := jumps.jump(norm)) is None:
            return None
        self._jumps = _jumps(JUMP * jumps.times)  # norms of this run jump, it seems
        return Sign(f"the norm of the gradient is {jump:.0f} times its median", jumps.usual)

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


def _jumps(times: float) -> Jumps:
    return Jumps(times, least=LEAST, kept=KEPT, new=1, in_a_row=IN_A_ROW)
