"""Rules about a GPU that is not fed: it waits for the loop, the CPU is full, or PCIe is busy."""

from collections.abc import Iterator

from hotloop.apps.top.advice.recent import Lasting
from hotloop.apps.top.advice.rule import Advice, Moment, computes, share_of_memory
from hotloop.printing.text import size

# Each condition is a mean over a minute; a second pair of numbers keeps it from flickering once it is said.
WAITING_FOR = 30.0  # seconds for which the mean must be low
WAITING_MEMORY, WAITING_MEMORY_UNTIL = 80.0, 70.0  # percent in use
WAITING_GPU, WAITING_GPU_UNTIL = 30.0, 40.0  # percent of utilisation

STARVED_FOR = 30.0
STARVED_CPU, STARVED_CPU_UNTIL = 95.0, 85.0  # percent of all cores
STARVED_GPU, STARVED_GPU_UNTIL = 50.0, 60.0

PCIE_FOR = 30.0
PCIE_BUSY, PCIE_BUSY_UNTIL = 8e9, 6e9  # bytes a second one way; 16 lanes of the third generation do twice that
PCIE_GPU, PCIE_GPU_UNTIL = 90.0, 95.0  # percent of utilisation from which the traffic does not hold anything up

LOOK = "`hotloop profile script.py` shows what it waits for"


class Waiting:
    """A GPU with 80% of its memory in use, on which somebody computes, and whose utilisation is at most 30%.

    It is said when the mean of a minute has been so for 30 s, and until memory is below 70% or utilisation above 40%.
    """

    def __init__(self) -> None:
        self._lasting: Lasting[int] = Lasting(WAITING_FOR)

    def see(self, moment: Moment) -> Iterator[Advice]:
        found = {}
        for gpu in moment.reading.gpus:
            utilisation, memory = moment.recent.mean(gpu.index, "utilisation"), share_of_memory(gpu)
            said = self._lasting.said(gpu.index)
            low, full = (WAITING_GPU_UNTIL, WAITING_MEMORY_UNTIL) if said else (WAITING_GPU, WAITING_MEMORY)
            if utilisation is None or memory is None or utilisation > low or memory < full:
                continue
            if computes(gpu, moment.recent):
                found[gpu.index] = utilisation, memory
        for index in self._lasting.see(found, moment.now):
            utilisation, memory = found[index]
            yield Advice(
                "waiting",
                index,
                f"the memory of GPU {index} is {memory:.0f}% full but its utilisation {utilisation:.0f}%: "
                "the loop waits for data or is launch-bound",
                fix=LOOK,
                evidence={"utilisation": round(utilisation, 1), "memory_percent": round(memory, 1)},
            )


class Starved:
    """A GPU that is computed on and at most at 50% of utilisation, while all cores of the host are at 95% or more.

    It is said when the means of a minute have been so for 30 s, and until the cores are below 85% or the GPU above 60%.
    """

    def __init__(self) -> None:
        self._lasting: Lasting[int] = Lasting(STARVED_FOR)

    def see(self, moment: Moment) -> Iterator[Advice]:
        cpu = moment.recent.mean(None, "cpu") or 0.0
        found = {}
        for gpu in moment.reading.gpus:
            utilisation = moment.recent.mean(gpu.index, "utilisation")
            said = self._lasting.said(gpu.index)
            low, busy = (STARVED_GPU_UNTIL, STARVED_CPU_UNTIL) if said else (STARVED_GPU, STARVED_CPU)
            if utilisation is not None and utilisation <= low and cpu >= busy and computes(gpu, moment.recent):
                found[gpu.index] = utilisation
        for index in self._lasting.see(found, moment.now):
            yield Advice(
                "starved",
                index,
                f"the CPU is at {cpu:.0f}% and GPU {index} at {found[index]:.0f}%: preparing the data takes the time",
                fix="prepare less per step: decode and resize the data once beforehand, augment on the GPU, "
                "or keep the dataset on it (`hotloop.stream`)",
                evidence={"cpu": round(cpu, 1), "utilisation": round(found[index], 1)},
            )


class Pcie:
    """A GPU to or from which 8 GB a second go over PCIe, and whose utilisation is at most 90%.

    It is said when the means of a minute have been so for 30 s, and until the traffic is below 6 GB a second or
    utilisation above 95%.
    """

    def __init__(self) -> None:
        self._lasting: Lasting[int] = Lasting(PCIE_FOR)

    def see(self, moment: Moment) -> Iterator[Advice]:
        found = {}
        for gpu in moment.reading.gpus:
            to, back = (moment.recent.mean(gpu.index, way) or 0.0 for way in ("received", "sent"))
            utilisation = moment.recent.mean(gpu.index, "utilisation")
            said = self._lasting.said(gpu.index)
            most, busy = (PCIE_GPU_UNTIL, PCIE_BUSY_UNTIL) if said else (PCIE_GPU, PCIE_BUSY)
            if max(to, back) >= busy and utilisation is not None and utilisation <= most:
                found[gpu.index] = to, back, utilisation
        for index in self._lasting.see(found, moment.now):
            to, back, utilisation = found[index]
            way = f"to GPU {index}" if to >= back else f"from GPU {index}"
            yield Advice(
                "pcie",
                index,
                f"PCIe is busy: {size(max(to, back))} a second go {way}, whose utilisation is {utilisation:.0f}%",
                fix="copy less: small types such as uint8, batches that stay there, or the dataset on the GPU "
                "(`hotloop.stream`)",
                evidence={"received": round(to), "sent": round(back), "utilisation": round(utilisation, 1)},
            )
