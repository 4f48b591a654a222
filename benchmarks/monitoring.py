"""The monitor on a real GPU: beside nvidia-smi, in a run, and with a process that holds memory and does nothing.

python benchmarks/monitoring.py --json benchmarks/results/monitoring.json

While a process keeps the GPU busy, every field that `hotloop top --json` shares with nvidia-smi is read from both, one
right after the other, and what nvidia-smi says once more, so that one sees what changes by itself. Then `loop.fit`
trains with and without `monitor=` in turns. Last, a process takes 4 GiB and sleeps until the advice names it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from harness.models import ResNet18
from hotloop.apps.top.advice import Advisor
from hotloop.monitor.sampler import Sampler
from hotloop.printing.text import printable

MIB = 2**20
BUSY = """
import torch
a = torch.randn(4096, 4096, device="cuda")
print("ready", flush=True)
while True:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
"""
IDLE = """
import time, torch
held = torch.zeros(4 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Field:
    """A field that both have: ours by its path in the JSON, theirs by its name; ours is divided by `unit`."""

    ours: str
    theirs: str
    unit: float = 1.0


FIELDS = (
    Field("index", "index"),
    Field("name", "name"),
    Field("uuid", "uuid"),
    Field("utilisation", "utilization.gpu"),
    Field("memory_used", "memory.used", MIB),
    Field("memory_free", "memory.free", MIB),
    Field("memory_total", "memory.total", MIB),
    Field("temperature", "temperature.gpu"),
    Field("fan", "fan.speed"),
    Field("power", "power.draw"),
    Field("power_limit", "enforced.power.limit"),
    Field("clock", "clocks.sm"),
    Field("clock_most", "clocks.max.sm"),
    Field("memory_clock", "clocks.mem"),
    Field("memory_clock_most", "clocks.max.mem"),
    Field("throttled", "clocks_event_reasons.active"),
    Field("ecc_corrected", "ecc.errors.corrected.volatile.total"),
    Field("ecc_uncorrected", "ecc.errors.uncorrected.volatile.total"),
)


@contextmanager
def process(code: str) -> Iterator[int]:
    """A process that runs until the end of the block; it has said that it is ready."""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
    finally:
        child.kill()
        child.wait()


def smi(query: str, fields: str) -> list[list[str]]:
    """What nvidia-smi says, a list of words for each line."""
    command = ["nvidia-smi", f"--query-{query}={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def top() -> dict[str, Any]:
    """What `hotloop top --json` says."""
    command = [sys.executable, "-m", "hotloop", "top", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def beside() -> dict[str, Any]:
    """Both on a busy GPU, field by field: nvidia-smi, hotloop, nvidia-smi."""
    names = ",".join(field.theirs for field in FIELDS)
    with process(BUSY):
        time.sleep(5)
        before, reading, after = smi("gpu", names)[0], top(), smi("gpu", names)[0]
        apps = [
            [pid, memory, Path(name).name] for pid, memory, name in smi("compute-apps", "pid,used_memory,process_name")
        ]
    gpu = reading["gpus"][0]
    rows = [
        {"field": f.ours, "hotloop": _ours(gpu[f.ours], f.unit), "nvidia-smi": [earlier, later]}
        for f, earlier, later in zip(FIELDS, before, after, strict=True)
    ]
    ours = [[p["pid"], _ours(p["memory"], MIB), printable(p["name"] or "–")] for p in gpu["processes"] or ()]
    return {"fields": rows, "processes": {"hotloop": ours, "nvidia-smi": apps}, "notes": reading["notes"]}


def _ours(value: Any, unit: float) -> Any:
    return round(value / unit, 2) if isinstance(value, (int, float)) and unit != 1 else value


def in_a_run(device: torch.device, seconds: float, turns: int) -> dict[str, Any]:
    """Images a second of a ResNet-18 that keeps the GPU busy, with and without a monitor, in turns."""
    images: dict[bool, list[float]] = {True: [], False: []}
    load = None
    data = TensorDataset(torch.randn(2**13, 3, 32, 32), torch.randint(10, (2**13,)))
    plan = hotloop.Plan(str(device), stream="resident")
    for turn in range(turns + 1):
        for monitor in (True, False) if turn % 2 else (False, True):
            model = ResNet18()
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device=device, plan=plan)
            loader = DataLoader(data, 1024, shuffle=True)
            report = loop.fit(loader, epochs=10**6, progress=False, time_limit=seconds, monitor=monitor)
            if turn:  # the first warms up
                images[monitor].append(statistics.median(e.items / e.seconds for e in report.epochs[1:-1]))
                load = report.load or load
    ratios = [a / b for a, b in zip(images[True], images[False], strict=True)]
    return {
        "images per second with": images[True],
        "and without": images[False],
        "with over without, median": statistics.median(ratios),
        "load": None if load is None else load.to_json(),
    }


def idle_holder(idle_for: float) -> dict[str, Any]:
    """What the advice says of a process that took 4 GiB and sleeps, and after how long."""
    advisor = Advisor(idle_for=idle_for)
    with process(IDLE) as pid, Sampler() as sampler:
        begin = time.monotonic()
        while time.monotonic() - begin < 2 * idle_for + 20:
            said = [advice for advice in advisor.see(sampler.read()) if advice.rule == "idle-memory"]
            if said:
                return {"pid": pid, "after": time.monotonic() - begin, "advice": said[0].to_json()}
            time.sleep(1)
    return {"pid": pid, "after": None, "advice": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each training")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--idle-for", type=float, default=20.0, help="seconds after which memory is held idly")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    choice = hotloop.pick()
    if choice.device.type != "cuda":
        sys.exit("this needs a CUDA GPU and nvidia-smi")
    found: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "device": choice.name}
    console = Console()
    for name, part in (
        ("beside", beside),
        ("run", lambda: in_a_run(choice.device, arguments.seconds, arguments.turns)),
        ("idle", lambda: idle_holder(arguments.idle_for)),
    ):
        found[name] = part()
        if name == "beside":
            table = Table("field", "hotloop top --json", "nvidia-smi before, after")
            for row in found[name]["fields"]:
                table.add_row(row["field"], str(row["hotloop"]), ", ".join(row["nvidia-smi"]))
            console.print(table)
            console.print_json(data=found[name]["processes"])
        else:
            console.print_json(data=found[name])
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
