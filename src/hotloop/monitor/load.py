"""`LoadTally`: what a stretch of time asks of the hardware, added up in memory that does not grow."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from itertools import accumulate
from typing import TypeVar

from hotloop.monitor.reading import Gpu, Reading, is_among
from hotloop.printing.text import printable
from hotloop.records import GpuLoad, Load

LONGEST_GAP = 10.0  # seconds between two samples over which power is still taken for constant
MOST_NOTES = 8

Number = TypeVar("Number", int, float)


class LoadTally:
    """Adds readings up to a `Load`.

    `gpus` are those to tell of, by index or UUID; without it they are those on which this program has a process, or all
    where none is known to have one.
    """

    def __init__(self, gpus: Collection[int | str] | None = None) -> None:
        self._wanted = gpus
        self._gpus: dict[int, _GpuTally] = {}
        self._cpu = _Mean()
        self._samples = 0
        self._first = self._last = 0.0
        self._notes: dict[str, None] = {}

    def add(self, reading: Reading, now: float) -> None:
        """Take a reading in; `now` is in seconds of a clock that never jumps."""
        if not self._samples:
            self._first = self._last = now
        passed, self._last = now - self._last, now
        self._samples += 1
        self._cpu.add(reading.host.cpu)
        for gpu in reading.gpus:
            if is_among(gpu, self._wanted):
                self._gpus.setdefault(gpu.index, _GpuTally()).add(gpu, passed)
                if gpu.error is not None:
                    self.note(f"GPU {gpu.index}: {gpu.error}")
        for note in reading.notes:
            self.note(note)

    def note(self, words: str) -> None:
        """Keep a sentence for the load, once."""
        if len(self._notes) < MOST_NOTES:
            self._notes[printable(words)] = None

    def load(self) -> Load:
        """What was added up so far."""
        gpus = [tally for _, tally in sorted(self._gpus.items())]
        ours = [tally for tally in gpus if tally.ours]
        chosen = gpus if self._wanted is not None else ours or gpus
        return Load(
            seconds=self._last - self._first,
            samples=self._samples,
            gpus=tuple(tally.load() for tally in chosen),
            cpu=self._cpu.value,
            notes=tuple(self._notes),
        )


class _GpuTally:
    """One GPU, added up."""

    def __init__(self) -> None:
        self.ours = False
        self._latest: Gpu | None = None
        self._utilisation, self._power = _Mean(), _Mean()
        self._percents = [0] * 101  # samples by utilisation, for the percentile
        self._memory: int | None = None
        self._temperature: float | None = None
        self._samples = 0  # in which it was known whether it was throttled
        self._throttled = 0
        self._reasons: Counter[str] = Counter()
        self._energy = _Energy()

    def add(self, gpu: Gpu, passed: float) -> None:
        self._latest = gpu
        self.ours = self.ours or any(process.ours for process in gpu.processes or ())
        self._utilisation.add(gpu.utilisation)
        if gpu.utilisation is not None:
            self._percents[min(max(round(gpu.utilisation), 0), 100)] += 1
        self._power.add(gpu.power)
        self._energy.add(gpu.energy, gpu.power, passed)
        self._memory = _most(self._memory, gpu.memory_used)
        self._temperature = _most(self._temperature, gpu.temperature)
        if gpu.throttled is not None:
            self._samples += 1
            self._throttled += bool(gpu.throttled)
            self._reasons.update(gpu.throttled)

    def load(self) -> GpuLoad:
        gpu = self._latest
        assert gpu is not None
        joules, origin = self._energy.joules()
        return GpuLoad(
            gpu.index,
            gpu.name,
            gpu.uuid,
            utilisation=self._utilisation.value,
            utilisation_p95=_percentile(self._percents, 0.95),
            memory_peak=self._memory,
            memory_total=gpu.memory_total,
            power=self._power.value,
            joules=joules,
            energy_from=origin,
            temperature=self._temperature,
            throttled=self._throttled / self._samples if self._samples else None,
            reasons={reason: times / self._samples for reason, times in sorted(self._reasons.items())},
        )


class _Energy:
    """Joules by the GPU's own counter, and by its power where there is none or since the counter last moved.

    Slow drivers are not asked for the counter in every sample, so that it may lag behind by some seconds.
    """

    def __init__(self) -> None:
        self._counter: float | None = None
        self._counted = 0.0
        self._since: float | None = None  # joules by power since the counter moved; None where it is not known
        self._watts: float | None = None
        self._moved = False

    def add(self, counter: float | None, watts: float | None, passed: float) -> None:
        if watts is not None and self._watts is not None and passed <= LONGEST_GAP:
            self._since = (self._since or 0.0) + (watts + self._watts) / 2 * passed
        self._watts = watts
        if counter is None:
            return
        if self._counter is None or counter < self._counter:  # one that fell is that of a driver that was loaded anew
            self._counted += self._since or 0.0
            self._since = None
        elif counter > self._counter:
            self._counted += counter - self._counter
            self._since, self._moved = None, True
        self._counter = counter

    def joules(self) -> tuple[float | None, str | None]:
        """The energy, and where it was read."""
        if self._moved:
            return self._counted + (self._since or 0.0), "counter"
        known = self._counted or self._since is not None
        return (self._counted + (self._since or 0.0), "power") if known else (None, None)


class _Mean:
    def __init__(self) -> None:
        self._total, self._count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self._total += value
            self._count += 1

    @property
    def value(self) -> float | None:
        return self._total / self._count if self._count else None


def _percentile(percents: list[int], share: float) -> float | None:
    """The lowest percent that this share of the samples does not exceed."""
    sums = list(accumulate(percents))
    return float(bisect_left(sums, share * sums[-1])) if sums[-1] else None


def _most(one: Number | None, other: Number | None) -> Number | None:
    return other if one is None else one if other is None else max(one, other)
