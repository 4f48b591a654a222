"""Rules about the computer around the GPUs: its memory is full, or it swaps."""

from collections.abc import Iterator

from hotloop.apps.top.advice.recent import Lasting
from hotloop.apps.top.advice.rule import Advice, Moment, computes
from hotloop.printing.text import size

HOST_FOR = 10.0  # seconds
HOST_MEMORY, HOST_MEMORY_UNTIL = 95.0, 92.0  # percent in use
SWAPPING, SWAPPING_UNTIL = 256 * 2**20, 64 * 2**20  # bytes by which the swap in use grows in a minute
HOST_COMPUTES = 50.0  # percent of all cores from which a machine without GPUs is said to train


class HostMemory:
    """The memory of the host in use to 95% for 10 s, until it is below 92%."""

    def __init__(self) -> None:
        self._lasting: Lasting[str] = Lasting(HOST_FOR)

    def see(self, moment: Moment) -> Iterator[Advice]:
        host = moment.reading.host
        share = 100 * host.memory_used / host.memory_total if host.memory_used and host.memory_total else 0.0
        limit = HOST_MEMORY_UNTIL if self._lasting.said("full") else HOST_MEMORY
        if self._lasting.see(["full"] if share >= limit else [], moment.now):
            yield Advice(
                "host-memory",
                None,
                f"the memory of the host is {share:.0f}% full: the system may end the training at any time",
                fix="fewer DataLoader workers (each holds its own copy of the dataset object), fewer batches ahead "
                "(`prefetch_factor`), memory-mapped data",
            )


class Swapping:
    """Swap in use that has grown by 256 MiB in a minute while somebody computes, until it grows by less than 64 MiB.

    It must be so for 10 s.
    """

    def __init__(self) -> None:
        self._lasting: Lasting[str] = Lasting(HOST_FOR)

    def see(self, moment: Moment) -> Iterator[Advice]:
        swapped = moment.recent.growth(None, "swap_used") or 0.0
        limit = SWAPPING_UNTIL if self._lasting.said("swapping") else SWAPPING
        holds = swapped >= limit and _somebody_computes(moment)
        if self._lasting.see(["swapping"] if holds else [], moment.now):
            yield Advice(
                "swapping",
                None,
                f"the host is swapping: {size(swapped)} in the last minute, which slows all that it feeds",
                fix="fewer DataLoader workers, memory-mapped data, or less beside the training",
            )


def _somebody_computes(moment: Moment) -> bool:
    if moment.reading.gpus:
        return any(computes(gpu, moment.recent) for gpu in moment.reading.gpus)
    return (moment.recent.mean(None, "cpu") or 0.0) >= HOST_COMPUTES
