"""The rule about a GPU that is not fed: the CPU is full, or it waits for the loop."""

from collections.abc import Iterator

from hotloop.apps.top.advice.recent import Lasting
from hotloop.apps.top.advice.rule import Advice, Moment, computes, share_of_memory

UNFED_FOR = 30.0  # seconds for which the mean of a minute must be so
# The second number of each pair keeps a condition from flickering once it is said. Percent:
STARVED_CPU, STARVED_CPU_UNTIL = 95.0, 85.0  # of all cores
STARVED_GPU, STARVED_GPU_UNTIL = 50.0, 60.0  # of utilisation
WAITING_MEMORY, WAITING_MEMORY_UNTIL = 80.0, 70.0  # in use
WAITING_GPU, WAITING_GPU_UNTIL = 30.0, 40.0


class Unfed:
    """A GPU on which somebody computes, and whose utilisation is low in the mean of a minute, for 30 s.

    Starved: at most 50% while all cores of the host are at 95% or more, until they are below 85% or it above 60%.
    Waiting, which is said where it is not starved: at most 30% with 80% of its memory in use, until memory is below 70%
    or utilisation above 40%.
    """

    def __init__(self) -> None:
        self._starved: Lasting[int] = Lasting(UNFED_FOR)
        self._waiting: Lasting[int] = Lasting(UNFED_FOR)

    def see(self, moment: Moment) -> Iterator[Advice]:
        cpu = moment.recent.mean(None, "cpu") or 0.0
        starved, waiting = {}, {}
        for gpu in moment.reading.gpus:
            utilisation, memory = moment.recent.mean(gpu.index, "utilisation"), share_of_memory(gpu)
            if utilisation is None or not computes(gpu, moment.recent):
                continue
            said = self._starved.said(gpu.index)
            low, busy = (STARVED_GPU_UNTIL, STARVED_CPU_UNTIL) if said else (STARVED_GPU, STARVED_CPU)
            if utilisation <= low and cpu >= busy:
                starved[gpu.index] = f"the CPU is at {cpu:.0f}% and GPU {gpu.index} at {utilisation:.0f}%"
            said = self._waiting.said(gpu.index)
            low, full = (WAITING_GPU_UNTIL, WAITING_MEMORY_UNTIL) if said else (WAITING_GPU, WAITING_MEMORY)
            if memory is not None and utilisation <= low and memory >= full:
                of_gpu = f"the memory of GPU {gpu.index} is {memory:.0f}% full"
                waiting[gpu.index] = f"{of_gpu} but its utilisation {utilisation:.0f}%"
        explained = self._starved.see(starved, moment.now)
        for index in explained:
            yield Advice(
                "starved",
                index,
                f"{starved[index]}: preparing the data takes the time",
                fix="prepare less per step: decode and resize the data once beforehand, augment on the GPU, "
                "or keep the dataset on it (`hotloop.stream`)",
            )
        for index in self._waiting.see(waiting, moment.now):
            if index not in explained:
                words = f"{waiting[index]}: the loop waits for data or is launch-bound"
                yield Advice("waiting", index, words, fix="`hotloop profile script.py` shows what it waits for")
