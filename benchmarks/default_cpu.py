"""Whole runs on a CPU: the tutorial's loop by hand against `Loop(…).fit(…)` with nothing said, by turns.

    python benchmarks/default_cpu.py --out benchmarks/results/default_cpu.json

Steps are short, since there hotloop's own work and a wrong plan weigh most. Every run begins with the same weights and
with nothing in the cache, and counts everything: building the `Loop`, timing steps, changing the plan, the report.
Beside the wall clock stands the processor time of the process; with `--threads 1` other programs hardly change it.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from harness.about import facts
from harness.data import images, rows, tokens
from harness.models import mlp
from hotloop.records.files import write_json

LEAST = 0.97  # times the tutorial's loop, which no workload may be under
BUSY = 0.15  # of the processor time of the machine that other programs may take before a pair of runs is repeated
WORDS, CLASSES = 200, 10


@dataclass(frozen=True)
class Workload:
    """What is trained."""

    network: Callable[[], nn.Module]
    optimize: Callable[..., Optimizer]
    criterion: nn.Module
    data: TensorDataset
    batch: int
    augment: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Run:
    """A whole run."""

    seconds: float
    processor: float  # seconds of all threads of this process
    others: float | None  # share of the machine's cores that other programs took meanwhile
    loss: float  # of the last epoch, or the last batch of the loop by hand
    levers: tuple[str, ...] = ()
    changed_at: tuple[int, ...] = ()  # steps at which another plan was taken


class LSTM(nn.Module):
    """The class of a text from the last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.embed(words))[0][:, -1])
        return scores


class Transformer(nn.Module):
    """The class of a text from the mean over PyTorch's own encoder, with its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embed(words)).mean(1))
        return scores


def cnn(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


def flip_and_shift(batch: list[Tensor]) -> list[Tensor]:
    """Mirror a random half of the images, and shift all of them by up to two pixels."""
    pictures, labels = batch
    mirrored = torch.rand(len(pictures), 1, 1, 1, device=pictures.device) < 0.5
    down, across = torch.randint(-2, 3, (2,)).tolist()
    return [torch.where(mirrored, pictures.flip(3), pictures).roll((down, across), (2, 3)), labels]


def texts(count: int, length: int) -> TensorDataset:
    """Texts, and a class that their last word decides."""
    words = tokens(count, length, WORDS, seed=0)
    return TensorDataset(words, words[:, -1] % CLASSES)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "small LSTM": lambda: Workload(LSTM, partial(Adam, lr=1e-3), nn.CrossEntropyLoss(), texts(640, 16), 32),
    "small transformer": lambda: Workload(
        Transformer, partial(AdamW, lr=1e-3), nn.CrossEntropyLoss(), texts(640, 16), 32
    ),
    "augmented CNN": lambda: Workload(
        partial(cnn, 8, 16, 32),
        partial(SGD, lr=0.05, momentum=0.9),
        nn.CrossEntropyLoss(),
        TensorDataset(*images(320, seed=0)),
        16,
        flip_and_shift,
    ),
    "MLP": lambda: Workload(mlp, partial(Adam, lr=1e-3), nn.MSELoss(), TensorDataset(*rows(1_024, seed=0)), 64),
    "tiny CNN": lambda: Workload(
        partial(cnn, 4, 8), partial(Adam, lr=1e-3), nn.CrossEntropyLoss(), TensorDataset(*images(320, seed=0)), 16
    ),
}


def parts(work: Workload) -> tuple[nn.Module, Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = work.network()
    return model, work.optimize(model.parameters()), DataLoader(work.data, work.batch, shuffle=True)


def by_hand(work: Workload, epochs: int | None) -> Iterator[Tensor]:
    """The tutorial's loop, which gives the loss of each batch; without a number of epochs it has no end."""
    model, optimizer, loader = parts(work)
    model.train()
    done = 0
    while epochs is None or done < epochs:
        done += 1
        for batch in loader:
            inputs, targets = batch if work.augment is None else work.augment(batch)
            optimizer.zero_grad()
            loss = work.criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield loss.detach()


def run_by_hand(work: Workload, epochs: int) -> tuple[float, hotloop.Report | None]:
    loss = torch.zeros(())
    for each in by_hand(work, epochs):
        loss = each
    return float(loss), None


def run_default(work: Workload, epochs: int) -> tuple[float, hotloop.Report | None]:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HOTLOOP_CACHE"] = cache
        model, optimizer, loader = parts(work)
        loop = hotloop.Loop(model, optimizer, work.criterion, device="cpu")
        report = loop.fit(loader, epochs=epochs, device_transform=work.augment, progress=False)
    if report.interrupted:  # Ctrl-C, which `fit` takes as the wish to end with a report
        raise KeyboardInterrupt
    return report.epochs[-1].loss, report


def timed(run: Callable[[Workload, int], tuple[float, hotloop.Report | None]], work: Workload, epochs: int) -> Run:
    busy, processor, start = _busy(), time.process_time(), time.perf_counter()
    loss, report = run(work, epochs)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    after, others = _busy(), None
    if busy is not None and after is not None:
        others = max(0.0, after - busy - processor) / (seconds * (os.cpu_count() or 1))
    if report is None:
        return Run(seconds, processor, others, loss)
    return Run(seconds, processor, others, loss, report.levers, tuple(change.step for change in report.plans[1:]))


def _busy() -> float | None:
    """Seconds for which the cores of the machine have worked, for whomever; None where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def epochs_of(work: Workload, seconds: float) -> int:
    """Epochs that the loop by hand does in about so many seconds, judged by the quickest of a few."""
    times: list[float] = []
    steps = by_hand(work, None)
    each = len(DataLoader(work.data, work.batch))
    for _ in islice(steps, 5):
        pass
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds / 8 or not times:
        start = time.perf_counter()
        for _ in islice(steps, each):
            pass
        times.append(time.perf_counter() - start)
    return max(1, round(seconds / min(times)))


def compare(work: Workload, seconds: float, repeats: int, retries: int) -> dict[str, Any]:
    """Runs by turns. A pair in which other programs took much of the machine is repeated, so often at most."""
    epochs = epochs_of(work, seconds)
    kept: list[tuple[Run, Run]] = []
    disturbed = 0
    while len(kept) < repeats:
        ways = (run_by_hand, run_default) if len(kept) % 2 == 0 else (run_default, run_by_hand)
        found = {way: timed(way, work, epochs) for way in ways}
        pair = found[run_by_hand], found[run_default]
        if disturbed < retries and any((run.others or 0.0) > BUSY for run in pair):
            disturbed += 1
            continue
        kept.append(pair)
    wall = [hand.seconds / default.seconds for hand, default in kept]
    processor = [hand.processor / default.processor for hand, default in kept]
    return {
        "epochs": epochs,
        "wall": {"median": statistics.median(wall), "low": min(wall), "high": max(wall)},
        "processor": {"median": statistics.median(processor), "low": min(processor), "high": max(processor)},
        "disturbed": disturbed,
        "by_hand": [asdict(hand) for hand, _ in kept],
        "default": [asdict(default) for _, default in kept],
    }


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="times as fast as the loop by hand: median (lowest to highest pair)")
    for column in ("workload", "by hand", "default", "wall clock", "processor time", "others", "plan at the end"):
        table.add_column(column, justify="left" if column in ("workload", "plan at the end") else "right")
    for name, row in results.items():
        hand, default = (statistics.median(run["seconds"] for run in row[way]) for way in ("by_hand", "default"))
        others = [run["others"] for way in ("by_hand", "default") for run in row[way] if run["others"] is not None]
        table.add_row(
            name,
            f"{hand:.2f} s",
            f"{default:.2f} s",
            *("{median:.2f} ({low:.2f} to {high:.2f})".format_map(row[clock]) for clock in ("wall", "processor")),
            f"{max(others):.0%}" if others else "–",
            "; ".join(dict.fromkeys(", ".join(run["levers"]) or "as by hand" for run in row["default"])),
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; all by default")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a run of the loop by hand")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--retries", type=int, default=6, help="pairs of a workload that are repeated on a busy machine"
    )
    parser.add_argument("--threads", type=int, help="of PyTorch; as many as it takes by itself where nothing is said")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here, as JSON")
    arguments = parser.parse_args()
    if unknown := set(arguments.workloads) - set(WORKLOADS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose of {', '.join(WORKLOADS)}")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    results: dict[str, dict[str, Any]] = {}
    run_default(WORKLOADS["MLP"](), 1)  # in which PyTorch loads what the first training of a process needs
    for name in arguments.workloads or WORKLOADS:
        row = compare(WORKLOADS[name](), arguments.seconds, arguments.repeats, arguments.retries)
        results[name] = row
        print(
            f"{name}: {row['wall']['median']:.2f} by the wall clock, {row['processor']['median']:.2f} by the processor"
        )
    Console(width=150).print(table_of(results))
    if arguments.out:
        write_json(arguments.out, {**facts([torch.device("cpu")]), "workloads": results})
    return 0 if all(row["wall"]["median"] >= LEAST for row in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
