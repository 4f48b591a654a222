"""A made-up machine, to see the view where there is no GPU, to test it, and to make its picture for the docs.

`python -m hotloop.apps.top.example docs/pictures/top.svg` draws the picture again.
"""

import io
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from hotloop.apps.top.advice import Advice
from hotloop.apps.top.history import History
from hotloop.apps.top.view import screen
from hotloop.apps.top.view_options import ViewOptions
from hotloop.monitor.reading import Gpu, Host, Process, Reading

GIB = 2**30
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
NOTE = "Made-up readings of a machine that does not exist."
DEMO = "DEMO: made-up readings"  # in place of the machine's name, which every view and every sample has
PROCESSES = (
    ("user", "python train.py --data /data/birds --epochs 90", 57.3, 104.0, 3 * 3600 + 420),
    ("guest", "python3 -m ipykernel_launcher -f kernel-4b1c.json", 4.1, 0.0, 2 * 86400),
    ("user", "python -m torch.distributed.run finetune.py", 1.9, 98.0, 740),
    ("root", "/usr/lib/xorg/Xorg :0", 0.2, 1.0, 12 * 86400),
)
HELD = Advice(
    rule="idle-memory",
    gpu=0,
    words="4.1 GiB of GPU 0 is held by python3 (PID 20417 of guest, idle for 12 min)",
    fix="if nobody needs it, end it (`kill 20417`); of a notebook, shut the kernel down",
)


def machine(gpus: int = 1, *, start: float | None = None, name: str = "workstation") -> Callable[[], Reading]:
    """A source of readings; with a given start, each is a second after the one before, and they are always the same."""
    counted = iter(range(sys.maxsize))

    def read() -> Reading:
        second = next(counted)
        now = time.time() if start is None else start + second
        return Reading(
            time=now,
            host=_host(second, name),
            gpus=tuple(_gpu(index, second, now) for index in range(gpus)),
            driver="580.95.05",
            notes=(NOTE,),
        )

    return read


def picture(width: int = 100, height: int = 24) -> str:
    """The screen after a minute of training, as SVG."""
    history, read = History(60), machine(start=time.mktime((2026, 3, 14, 15, 9, 0, 0, 0, -1)))
    for reading in (read() for _ in range(61)):
        history.add(reading)
    console = Console(record=True, width=width, height=height, file=io.StringIO(), color_system="truecolor")
    for line in screen(reading, history, (HELD,), width=width, height=height, options=ViewOptions(me="user")):
        console.print(line, no_wrap=True, crop=True)
    drawn = console.export_svg(title="hotloop top", unique_id="top")
    return FONT.sub("", drawn)  # whoever looks at it asks no server for a font


def _gpu(index: int, second: int, now: float) -> Gpu:
    busy = max(0.0, min(100.0, 91 + 7 * _wave(second, 9 + index) - (55 if second % 31 in (4, 5, 6) else 0)))
    processes = tuple(_processes(index, now))
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


def _processes(index: int, now: float) -> Iterator[Process]:
    for number, (user, command, held, cpu, lasted) in enumerate(PROCESSES[index % 2 :: 1 if index == 0 else 2]):
        yield Process(
            pid=(20416, 20417, 31180, 1204)[number] + 100 * index,
            memory=int(held * GIB),
            kind="graphics" if user == "root" else "compute",
            name=command.split(maxsplit=1)[0].rsplit("/", 1)[-1],
            command=command,
            user=user,
            cpu=cpu,
            started=now - lasted,
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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
