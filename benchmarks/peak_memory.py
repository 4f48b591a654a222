"""The peak memory of a run in which nothing is said, beside the tutorial's loop and the plan which that run ends with.

    python benchmarks/peak_memory.py --json benchmarks/results/peak_memory.json

All run in one process, each from an emptied allocator. The first steps of such a run are the tutorial's, and the plan's
are compared with them where the data is on the device already: it may have the tutorial's peak and the data, or the
plan's peak where that is more. What looking, trials and captures need on top of it shows. It needs a CUDA GPU.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import TensorDataset

import hotloop
from harness.about import facts
from harness.contestants import contestants
from harness.contestants.hot import loop_of
from harness.running import fresh_start
from harness.switches import OwnSwitches
from harness.workloads import Workload, workload
from hotloop.errors import HotloopError
from hotloop.plan import Plan
from hotloop.printing.text import size
from hotloop.records.files import write_json

WORKLOADS = ("mlp", "cnn", "resnet18", "dcgan", "lstm", "llama", "bert", "unet", "unseen-vit")
TUTORIAL = 30  # batches


@dataclass(frozen=True)
class Peaks:
    """Bytes that tensors had on the device at most, beyond those from before the run."""

    workload: str
    plan: str  # at the end of the run in which nothing was said
    batches: int
    data: int  # of all items, where the plan has them on the device
    tutorial: int
    default: int
    given: int  # with that plan from the first step on

    @property
    def ratio(self) -> float:
        return self.default / max(self.tutorial + self.data, self.given)


@dataclass
class Peak:
    bytes: int = 0


@contextmanager
def peak_on(device: torch.device) -> Iterator[Peak]:
    """The peak of what is done in here, from an emptied allocator."""
    torch.manual_seed(0)
    fresh_start(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    peak = Peak()
    with OwnSwitches(device).turn():
        yield peak
        torch.cuda.synchronize(device)
    peak.bytes = torch.cuda.max_memory_allocated(device) - before


def peak_of(work: Workload, epochs: int, plan: Plan | str, device: torch.device) -> tuple[int, Plan]:
    """The peak of a run and its last plan."""
    with peak_on(device) as peak:
        parts = work.parts()
        loop = loop_of(parts, device, plan)
        loop.fit(parts.loader, epochs=epochs, device_transform=parts.device_transform, progress=False, monitor=False)
    return peak.bytes, loop.plan


def tutorial_peak(work: Workload, device: torch.device) -> int:
    """The peak of the tutorial's loop."""
    with peak_on(device) as peak:
        steps = contestants(["tutorial"])["tutorial"](work.parts(), device).steps
        assert steps is not None
        for _ in islice(steps(), TUTORIAL):
            pass
    return peak.bytes


def measured(name: str, batches: int, device: torch.device) -> Peaks:
    """Both peaks of a workload."""
    make = partial(workload, name, device, seed=0)  # anew for each: data that is on the device stays there with it
    work = make()
    epochs = max(1, round(batches * work.batch / work.items))
    default, plan = peak_of(make(), epochs, "auto", device)
    given, _ = peak_of(make(), epochs, plan, device)
    is_resident = plan.stream == "resident" and isinstance(work.dataset, TensorDataset)
    data = sum(each.nbytes for each in getattr(work.dataset, "tensors", ())) if is_resident else 0
    steps = epochs * -(-work.items // work.batch)
    return Peaks(name, repr(plan), steps, data, tutorial_peak(work, device), default, given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS, help=", ".join(WORKLOADS))
    parser.add_argument("--batches", type=int, default=400, metavar="N", help="train on about so many [400]")
    parser.add_argument("--within", type=float, default=600.0, metavar="SECONDS", help="begin none after these [600]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("peak_memory.py: it needs a CUDA GPU (`hotloop device` says why there is none)")
    device = hotloop.pick("cuda").device
    console, rows, start = Console(stderr=True), list[Peaks](), time.monotonic()
    for name in options.workloads:
        if time.monotonic() - start > options.within:
            console.print(f"{name} and what follows were not begun: the time is over")
            break
        try:
            rows.append(measured(name, options.batches, device))
        except HotloopError as error:
            console.print(f"{name}: {error}", markup=False)
            continue
        console.print(f"{name}: {size(rows[-1].default)}, {rows[-1].ratio:.3f} of what it may have", markup=False)
        if options.json:
            peaks = [asdict(row) | {"ratio": row.ratio} for row in rows]
            write_json(options.json, {**facts([device]), "peaks": peaks})
    table = Table("workload", "tutorial", "data", "nothing said", "its plan given", "of what it may have")
    for row in rows:
        table.add_row(row.workload, *map(size, (row.tutorial, row.data, row.default, row.given)), f"{row.ratio:.3f}")
    Console().print(table)
    for row in rows:
        Console().print(f"{row.workload}: {row.plan}", markup=False)


if __name__ == "__main__":
    main()
