"""Memory that runs out in the middle of a run: hotloop and Accelerate beside a run that has enough.

python benchmarks/out_of_memory.py --json benchmarks/results/out_of_memory.json

Two networks whose batches need about 6 GiB train for 120 steps. After 40 steps the process is capped at 2 GiB, as when
another program takes the memory; after 80 the cap is lifted. What is told: the losses beside those of the run that was
never capped, the size of pieces at each step, and what was lost: steps that had to be made again, and time. It also
times a plain step with and without the means to survive.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from harness.about import facts
from harness.models import GPT, GPTSize, ResNet18, mlp
from hotloop.device.clock import synchronize
from hotloop.errors import MemoryWarning

GIB = 2**30
Batch = tuple[Tensor, Tensor]


@dataclass
class Workload:
    """A network, how to make batches for it, and what it minimises."""

    name: str
    network: Callable[[], nn.Module]
    rows: Callable[[int, torch.Generator], Batch]
    rate: float
    batch: int = 0

    def data(self, steps: int, device: torch.device) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            inputs, targets = self.rows(self.batch, generator)
            yield inputs.to(device), targets.to(device)

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.network()
        return model, torch.optim.AdamW(model.parameters(), self.rate)


def objective(model: nn.Module, batch: Batch) -> Tensor:
    if Cap.items is not None and len(batch[0]) > Cap.items:
        raise torch.OutOfMemoryError("CUDA out of memory. (A cap on items, where there is no GPU.)")
    scores = model(batch[0])
    return F.cross_entropy(scores.flatten(0, -2), batch[1].flatten())


def images(count: int, generator: torch.Generator) -> Batch:
    classes = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return noise + classes.view(-1, 1, 1, 1) / 40, classes  # hard enough that the loss stays away from 0


def texts(size: GPTSize) -> Callable[[int, torch.Generator], Batch]:
    def rows(count: int, generator: torch.Generator) -> Batch:
        start = torch.randint(size.vocabulary, (count, 1), generator=generator)
        tokens = (start + 7 * torch.arange(size.context + 1)) % size.vocabulary  # each token tells the next
        return tokens[:, :-1], tokens[:, 1:]

    return rows


class Cap:
    """A limit on the memory of this process; without a GPU, to see that all works, on the items at once."""

    items: int | None = None

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device, self._limit = device, limit

    def put(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what is cached above the cap would not be taken away
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(self._limit / total, self._device)
        else:
            Cap.items = 3

    def lift(self) -> None:
        Cap.items = None
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)


@dataclass
class Told:
    """What one run gave."""

    losses: list[float] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)  # of pieces, None for whole batches
    seconds: list[float] = field(default_factory=list)  # of each step
    failures: int = 0
    thrown_away: int = 0  # steps that had to be made again
    peak: int | None = None

    @property
    def total(self) -> float:
        return sum(self.seconds)


def train(workload: Workload, device: torch.device, steps: int, capped: range, cap: Cap) -> Told:
    """hotloop's plain loop; `capped` are the steps under the cap."""
    model, optimizer = workload.parts()
    loop = hotloop.Loop(model, optimizer, objective=objective, device=device, plan="plain")
    told = Told()
    losses: list[Tensor] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for number, batch in enumerate(loop.batches(workload.data(steps, device))):
        if capped and number == capped.start:
            cap.put()
        if capped and number == capped.stop:
            cap.lift()
        synchronize(device)
        start = time.perf_counter()
        losses.append(loop.step(batch))
        synchronize(device)
        told.seconds.append(time.perf_counter() - start)
        told.sizes.append(loop.plan.micro_batch)
    cap.lift()
    told.losses = torch.stack(losses).tolist()
    told.failures = loop.out_of_memory
    told.peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return told


def train_with_accelerate(workload: Workload, device: torch.device, steps: int, capped: range, cap: Cap) -> Told:
    """The same in Accelerate's `find_executable_batch_size`, which calls the function again with a smaller batch."""
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415  # only here, and it may not be there

    told = Told()

    @find_executable_batch_size(starting_batch_size=workload.batch)
    def run(batch_size: int) -> None:
        told.thrown_away += len(told.losses)
        told.failures += 1
        told.losses = []
        told.sizes.append(batch_size)
        model, optimizer = workload.parts()
        model.to(device)
        for number, batch in enumerate(workload.data(steps, device)):
            if number == capped.start and told.failures == 1:
                cap.put()
            for inputs, targets in zip(batch[0].split(batch_size), batch[1].split(batch_size), strict=True):
                optimizer.zero_grad()
                loss = objective(model, (inputs, targets))
                loss.backward()
                optimizer.step()
                break  # a step is a batch of the size that it has found
            told.losses.append(loss.item())

    start = time.perf_counter()
    run()
    synchronize(device)
    told.seconds = [time.perf_counter() - start]
    told.failures -= 1
    cap.lift()
    return told


def sized(workload: Workload, device: torch.device, need: int) -> None:
    """Choose the batch that needs about so many bytes."""
    if device.type != "cuda":
        workload.batch = 8
        return
    peaks: dict[int, int] = {}
    for workload.batch in (64, 64, 192):  # the first time also pays for what libraries allocate once
        peaks[workload.batch] = train(workload, device, 3, range(0), Cap(device, 0)).peak or 0
    each = (peaks[192] - peaks[64]) / 128
    workload.batch = max(32, int((need - peaks[64]) / each + 64) // 16 * 16)


def overhead(device: torch.device, network: Callable[[], nn.Module], rows: Batch, calls: int) -> dict[str, float]:
    """A plain step with and without the means to survive, in turns: medians, and the share that is added."""
    torch.manual_seed(0)
    batch = tuple(part.to(device) for part in rows)
    loops = []
    for _ in range(2):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        loop = hotloop.Loop(model, optimizer, objective=_fit_rows, device=device, plan="plain")
        given = next(epoch := loop.batches([batch]))
        for _ in range(5):
            loop.step(given)
        loops.append((loop, given, epoch))
    snapshot = loops[1][0]._core.memory.snapshot
    snapshot.take = lambda batch=None: None  # type: ignore[method-assign]
    times: list[list[float]] = [[], []]
    for number in range(calls):
        for which in (0, 1) if number % 2 else (1, 0):
            loop, given, _ = loops[which]
            synchronize(device)
            start = time.perf_counter()
            loop.step(given)
            synchronize(device)
            times[which].append(time.perf_counter() - start)
    with_it, without = map(statistics.median, times)
    return {"with": with_it, "without": without, "share": with_it / without - 1}


def _fit_rows(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1]) if batch[1].dim() > 1 else F.cross_entropy(model(batch[0]), batch[1])


def apart(mine: list[float], theirs: list[float]) -> dict[str, float]:
    """How far two curves of losses are from each other, as a share of the loss."""
    scale = statistics.mean(map(abs, theirs))
    each = [abs(a - b) / scale for a, b in zip(mine, theirs, strict=True)]
    return {"mean": statistics.mean(each), "most": max(each)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="the second third of them is capped")
    parser.add_argument("--quick", action="store_true", help="a few steps of small networks, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    choice = hotloop.pick()
    device = choice.device
    steps = 12 if arguments.quick else arguments.steps
    capped = range(steps // 3, 2 * steps // 3)
    size = GPTSize(2, 2, 64, 32, 128) if arguments.quick else GPTSize(8, 8, 512, 512, 8192)
    workloads = [
        Workload("ResNet-18", lambda: ResNet18(width=8 if arguments.quick else 64), images, 1e-4),
        Workload("GPT, 30M parameters", lambda: GPT(size), texts(size), 3e-4),
    ]
    cap = Cap(device, 2 * GIB)
    found: dict[str, Any] = {
        **facts([device]),
    }
    warnings.simplefilter("ignore", MemoryWarning)
    for workload in workloads:
        sized(workload, device, 6 * GIB)
        train(workload, device, 3, range(0), cap)  # warm-up
        enough = train(workload, device, steps, range(0), cap)
        again = train(workload, device, steps, range(0), cap)
        tight = train(workload, device, steps, capped, cap)
        row: dict[str, Any] = {
            "batch": workload.batch,
            "parameters": sum(p.numel() for p in workload.network().parameters()),
            "peak of the run with enough memory": enough.peak,
            "losses": {"enough": enough.losses, "capped": tight.losses},
            "apart": apart(tight.losses, enough.losses),
            "noise": apart(again.losses, enough.losses),
            "sizes": tight.sizes,
            "hotloop": {"failures": tight.failures, "steps made again": 0, "seconds": tight.total},
            "enough": {"seconds": enough.total, "step": statistics.median(enough.seconds)},
            "capped step": statistics.median(tight.seconds[capped.start + 1 : capped.stop]),
        }
        lost = sum(sorted(tight.seconds)[-tight.failures :]) if tight.failures else 0.0
        row["hotloop"]["seconds lost in failures"] = lost
        with suppress(ImportError):
            theirs = train_with_accelerate(workload, device, steps, capped, cap)
            row["accelerate"] = {
                "failures": theirs.failures,
                "steps made again": theirs.thrown_away,
                "seconds": theirs.total,
                "batch at the end": theirs.sizes[-1],
            }
        found[workload.name] = row
        shown = {key: value for key, value in row.items() if key not in ("losses", "sizes")}
        changes = [(i, s) for i, s in enumerate(tight.sizes) if i == 0 or s != tight.sizes[i - 1]]
        print(f"{workload.name}: {json.dumps(shown, indent=1)}\n sizes of pieces from step: {changes}", flush=True)
        _write(found, arguments.json)
    count, calls = (8, 10) if arguments.quick else (256, 400)
    rows = (torch.randn(64, 16), torch.zeros(64, 1)), images(count, torch.Generator())
    found["overhead"] = {
        "MLP": overhead(device, mlp, rows[0], 5 * calls),
        "ResNet-18": overhead(device, workloads[0].network, rows[1], calls),
    }
    print(f"the means to survive, when nothing fails: {json.dumps(found['overhead'], indent=1)}")
    _write(found, arguments.json)


def _write(found: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
