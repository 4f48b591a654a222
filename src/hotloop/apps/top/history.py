"""`History`: the numbers of the last minute or hour, for sparklines and plots, in memory that does not grow."""

import math
from array import array
from collections import deque
from collections.abc import Collection
from operator import attrgetter

from hotloop.errors import BadArgument
from hotloop.monitor.reading import GPU_FIELDS, HOST_FIELDS, Reading

# Numbers that tell of a stretch of time: of readings that are merged, their mean is kept. Of all others, the latest.
_GPU_MEANS = {GPU_FIELDS.index(n) for n in ("utilisation", "power", "clock", "memory_clock", "sent", "received")}
_HOST_MEANS = {HOST_FIELDS.index(n) for n in ("cpu", "disk_read", "disk_written", "net_received", "net_sent")}
_gpu_numbers, _host_numbers = attrgetter(*GPU_FIELDS), attrgetter(*HOST_FIELDS)
SLACK = 0.9  # a sample that comes this share of `every` after the one before is a new one: timers are not exact
MOST_MERGED = 2**16 - 1  # readings in one mean; were there more, the later ones would weigh a little too much


class History:
    """Samples of the last `seconds`, at most one in `every` seconds; what comes quicker is merged.

    A clock that is set back takes the samples along, so that times always rise. A pause, as of a laptop that slept,
    shows in the times alone.

    >>> from hotloop.monitor.reading import Gpu, Host
    >>> history = History(seconds=60)
    >>> for second in range(3):
    ...     history.add(Reading(float(second), Host(cpu=50.0), (Gpu(0, "H200", utilisation=90.0 + second),)))
    >>> history.times, history.gpu(0, "utilisation"), history.gpu(0, "fan")
    ([0.0, 1.0, 2.0], [90.0, 91.0, 92.0], [None, None, None])
    """

    def __init__(self, seconds: float, every: float = 1.0) -> None:
        if not (0 < every <= seconds < math.inf):
            raise BadArgument(
                f"a history of {seconds} s, one sample every {every} s",
                fix="both must be positive, and the history must be at least as long as the time between two samples",
            )
        self.seconds = seconds
        self.every = every
        self._samples: deque[_Sample] = deque(maxlen=math.ceil(seconds / (every * SLACK)) + 1)

    def add(self, reading: Reading) -> None:
        """Take the numbers of a reading in; old ones leave."""
        samples = self._samples
        if samples and reading.time < samples[-1].last:
            self._set_back(reading.time)
        if samples and reading.time - samples[-1].time < self.every * SLACK:
            samples[-1].merge(reading)
        else:
            samples.append(_Sample(reading))
        while samples[0].time < reading.time - self.seconds:
            samples.popleft()

    def _set_back(self, now: float) -> None:
        # How much time really went by is not known; about one interval is the best guess.
        by = self._samples[-1].last - now + self.every
        for sample in self._samples:
            sample.time -= by
            sample.last -= by

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def times(self) -> list[float]:
        """When each sample was taken, in seconds since 1970, rising."""
        return [sample.time for sample in list(self._samples)]

    @property
    def indices(self) -> list[int]:
        """The GPUs that any of the samples tells of."""
        return sorted({index for sample in list(self._samples) for index in sample.gpus})

    def gpu(self, index: int, field: str) -> list[float | None]:
        """A number of a GPU at each of the `times`; None where it was not known or the GPU was not there."""
        column = _column(field, GPU_FIELDS)
        rows = (sample.gpus.get(index) for sample in list(self._samples))
        return [None if row is None else row.known(column) for row in rows]

    def host(self, field: str) -> list[float | None]:
        """A number of the computer at each of the `times`; None where it was not known."""
        column = _column(field, HOST_FIELDS)
        return [sample.host.known(column) for sample in list(self._samples)]


class _Sample:
    """What was known at one time, or at several shortly after one another."""

    __slots__ = ("gpus", "host", "last", "time")

    def __init__(self, reading: Reading) -> None:
        self.time = reading.time  # of the first reading in it
        self.host = _Row(len(HOST_FIELDS))
        self.gpus: dict[int, _Row] = {}
        self.merge(reading)

    def merge(self, reading: Reading) -> None:
        self.last = reading.time
        self.host.merge(_host_numbers(reading.host), _HOST_MEANS)
        gpus = dict(self.gpus)  # the old one may be read in another thread meanwhile
        for gpu in reading.gpus:
            gpus.setdefault(gpu.index, _Row(len(GPU_FIELDS))).merge(_gpu_numbers(gpu), _GPU_MEANS)
        self.gpus = gpus


class _Row:
    """Numbers side by side, NaN where one is not known: eight bytes each instead of an object."""

    __slots__ = ("counts", "values")

    def __init__(self, width: int) -> None:
        self.values = array("d", [math.nan]) * width
        self.counts = array("H", [0]) * width  # of the readings in each mean

    def merge(self, numbers: tuple[float | None, ...], means: Collection[int]) -> None:
        values, counts = self.values, self.counts
        for column, number in enumerate(numbers):
            if number is None:
                continue
            count = counts[column] = min(counts[column] + 1, MOST_MERGED)
            if count > 1 and column in means:
                values[column] += (number - values[column]) / count
            else:
                values[column] = number

    def known(self, column: int) -> float | None:
        value = self.values[column]
        return None if math.isnan(value) else value


def _column(name: str, names: tuple[str, ...]) -> int:
    if name not in names:
        raise BadArgument(f"no history is kept of {name!r}", fix=f"choose one of: {', '.join(names)}")
    return names.index(name)
