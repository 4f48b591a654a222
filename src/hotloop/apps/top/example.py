"""A made-up machine, to see the view where there is no GPU, and to test it."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from hotloop.monitor.reading import Gpu, Host, Process, Reading

GIB = 2**30
NOTE = "Made-up readings of a machine that does not exist."
DEMO = "DEMO: made-up readings"  # in place of the machine's name, which every view and every sample has
PROCESSES = (
    ("user", "python train.py --data /data/birds --epochs 90", 57.3, 104.0, 3 * 3600 + 420),
    ("guest", "python3 -m ipykernel_launcher -f kernel-4b1c.json", 4.1, 0.0, 2 * 86400),
    ("user", "python -m torch.distributed.run finetune.py", 1.9, 98.0, 740),
    ("root", "/usr/lib/xorg/Xorg :0", 0.2, 1.0, 12 * 86400),
)


def machine(gpus: int = 1, *, start: float | None = None, name: str = "workstation") -> Callable[[], Reading]:
    """A source of readings; with a given start, each is a second after the one before, and they are always the same."""
    counted, begun = iter(range(sys.maxsize)), time.time() if start is None else start

    def read() -> Reading:
        reading = reading_at(next(counted), begun, gpus, name)
        return reading if start is not None else replace(reading, time=time.time())

    return read


def reading_at(second: int, begun: float, gpus: int, name: str) -> Reading:
    """What the machine does in one second, which is the same whenever asked for."""
    seen = tuple(_gpu(index, second, begun) for index in range(gpus))
    return Reading(begun + second, _host(second, name), seen, "580.95.05", (NOTE,))


def _gpu(index: int, second: int, begun: float) -> Gpu:
    busy = max(0.0, min(100.0, 91 + 7 * _wave(second, 9 + index) - (55 if second % 31 in (4, 5, 6) else 0)))
    processes = tuple(_processes(index, begun))
    used = sum(process.memory or 0 for process in processes) + GIB // 2
    watts = 180 + 5.2 * busy
    return Gpu(
        index=index,
        name="NVIDIA H200",
        utilisation=round(busy),
        memory_used=used,
        memory_free=141 * GIB - used,
        memory_total=141 * GIB,
        temperature=58 + round(busy / 12),
        power=watts,
        power_limit=700.0,
        clock=1755.0,
        clock_most=1980.0,
        memory_clock=3201.0,
        memory_clock_most=3201.0,
        throttled=("power cap",) if index == 0 else (),
        sent=41e6 * (1 + 0.2 * _wave(second, 5)),
        received=1.3e9 * (1 + 0.1 * _wave(second, 7)),
        ecc_corrected=0,
        ecc_uncorrected=0,
        processes=processes,
    )


def _processes(index: int, begun: float) -> Iterator[Process]:
    for number, (user, command, held, cpu, lasted) in enumerate(PROCESSES[index % 2 :: 1 if index == 0 else 2]):
        yield Process(
            pid=(20416, 20417, 31180, 1204)[number] + 100 * index,
            memory=int(held * GIB),
            kind="graphics" if user == "root" else "compute",
            name=command.split(maxsplit=1)[0].rsplit("/", 1)[-1],
            command=command,
            user=user,
            cpu=cpu,
            started=begun - lasted,
        )


def _host(second: int, name: str) -> Host:
    return Host(
        name=name,
        cpu=34 + 12 * _wave(second, 13),
        cores=32,
        memory_used=int((71.5 + 2 * _wave(second, 40)) * GIB),
        memory_total=251 * GIB,
        swap_used=0,
        disk_read=212e6 * (1 + 0.5 * _wave(second, 6)),
        disk_written=3.1e6,
        net_received=1.2e6,
        net_sent=310e3,
    )


def _wave(second: int, period: float) -> float:
    return math.sin(2 * math.pi * second / period)
