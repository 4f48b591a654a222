"""Time an epoch with batches that come directly, copied ahead, or from data that lives on the device.

    python benchmarks/streams.py --json benchmarks/results/streams.json

The contestant is the loop that tutorials teach, over the same DataLoader. Epochs of all four are interleaved, so that
whatever the machine does meanwhile hits them alike; the first epoch of each is left out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from harness.about import facts
from hotloop.device.clock import synchronize
from hotloop.printing.text import count
from hotloop.records.files import write_json

KINDS = ("direct", "prefetched", "resident")


def mlp(rows: int) -> tuple[nn.Module, TensorDataset, nn.Module, int]:
    """The tutorial's network: 16 numbers in, 64 neurons, one out."""
    x = torch.randn(rows, 16)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), TensorDataset(x, x[:, :1]), nn.MSELoss(), 64


def cnn(rows: int) -> tuple[nn.Module, TensorDataset, nn.Module, int]:
    """A small convolutional network on 32x32 colour images."""
    layers: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))
    data = TensorDataset(torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,)))
    return model, data, nn.CrossEntropyLoss(), 256


def tutorial(build: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    model, data, loss, batch = build()
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(data, batch, shuffle=True)

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()

    return epoch


def with_loop(build: Callable[[], Any], device: torch.device, kind: str) -> Callable[[], None]:
    model, data, loss, batch = build()
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), loss, device=device)
    batches = hotloop.stream(DataLoader(data, batch, shuffle=True), loop.device, kind)  # type: ignore[arg-type]

    def epoch() -> None:
        for each in batches:
            loop.step(each)

    return epoch


def seconds(epoch: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    epoch()
    synchronize(device)
    return time.perf_counter() - start


def compare(build: Callable[[], Any], rows: int, device: torch.device, repeats: int) -> dict[str, dict[str, float]]:
    """Items per second of each way: the median epoch, the slowest and the fastest."""
    kinds = [kind for kind in KINDS if device.type == "cuda" or kind != "prefetched"]
    ways = {"tutorial": tutorial(build, device), **{kind: with_loop(build, device, kind) for kind in kinds}}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, epoch in ways.items():
            taken = seconds(epoch, device)
            if repeat:
                times[name].append(taken)
    return {
        name: {"median": rows / statistics.median(t), "low": rows / max(t), "high": rows / min(t)}
        for name, t in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few items only, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    choice = hotloop.pick()
    scale = 20 if arguments.quick else 1 if choice.device.type == "cuda" else 10
    table = Table(title=f"items per second on {choice.name or choice.device}, median (slowest to fastest epoch)")
    for column in ("workload", "way", "items/s", "spread", "times the tutorial"):
        table.add_column(column, justify="left" if column in ("workload", "way") else "right")
    results = {}
    for name, build, rows in (("mlp", mlp, 16_384 // scale), ("small cnn", cnn, 20_480 // scale)):
        figures = compare(lambda build=build, rows=rows: build(rows), rows, choice.device, arguments.repeats)
        results[name] = figures
        for way, rate in figures.items():
            gain = rate["median"] / figures["tutorial"]["median"]
            table.add_row(
                name, way, count(rate["median"]), f"{count(rate['low'])} to {count(rate['high'])}", f"{gain:.2f}"
            )
    Console(width=110).print(table)
    if arguments.json:
        about = facts([choice.device]) | {"repeats": arguments.repeats}
        write_json(arguments.json, about | {"items_per_second": results})


if __name__ == "__main__":
    sys.exit(main())
