"""`Advisor`: looks at readings one after another and says what a person should know."""

from dataclasses import replace

from hotloop.apps.top.advice.host_limits import HostMemory, Swapping
from hotloop.apps.top.advice.recent import Recent
from hotloop.apps.top.advice.rule import Advice, Moment, Rule
from hotloop.apps.top.advice.shared_gpus import IDLE_FOR, IdleMemory, UnusedGpu
from hotloop.apps.top.advice.starving import Unfed
from hotloop.apps.top.advice.trouble import FailedGpu, MemoryErrors, Slowed
from hotloop.monitor.reading import Reading

LONGEST_GAP = 300.0  # seconds between two readings, after which what was known is forgotten: nobody looked


class Advisor:
    """Gives the advice that holds after each reading, the gravest first; its memory does not grow.

    Memory is held idly after `idle_for` seconds.

    >>> from hotloop.monitor.reading import Gpu, Host
    >>> advisor = Advisor()
    >>> [advice] = advisor.see(Reading(0.0, Host(), (Gpu(0, "H200", ecc_uncorrected=2),)))
    >>> advice.words
    'the memory of GPU 0 has had 2 errors that could not be corrected: results may be wrong'
    """

    def __init__(self, *, idle_for: float = IDLE_FOR) -> None:
        self._idle_for = idle_for
        self._begin()
        self._last: float | None = None

    def _begin(self) -> None:
        trouble = (FailedGpu(), MemoryErrors(), HostMemory(), Swapping(), Slowed())
        self._rules: tuple[Rule, ...] = (*trouble, IdleMemory(self._idle_for), Unfed(), UnusedGpu())
        self._recent = Recent()
        self._now = 0.0

    def see(self, reading: Reading) -> tuple[Advice, ...]:
        """Take a reading in, and say what holds now."""
        # Clocks jump and laptops sleep: the rules have a clock of their own, which goes on only while somebody looks.
        passed = 0.0 if self._last is None else reading.time - self._last
        self._last = reading.time
        if passed > LONGEST_GAP:
            self._begin()
        self._now += min(max(passed, 0.0), LONGEST_GAP)
        self._recent.add(replace(reading, time=self._now))
        moment = Moment(self._now, reading, self._recent)
        return tuple(said for rule in self._rules for said in rule.see(moment))
