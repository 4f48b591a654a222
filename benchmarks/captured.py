"""Items per second of small networks in steady state: 16 steps in one CUDA graph, one, and eager. Needs a CUDA GPU.

python benchmarks/captured.py          # both
python benchmarks/captured.py mlp      # one of them
"""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop


class Work(NamedTuple):
    """What is trained, and for how many epochs in a repeat."""

    model: nn.Module
    data: TensorDataset
    loss: nn.Module
    batch: int
    epochs: int


def mlp() -> Work:
    x = torch.randn(1024, 32)
    layers = [nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)]
    return Work(nn.Sequential(*layers), TensorDataset(x, x[:, :1]), nn.MSELoss(), 64, 1500)


def cnn() -> Work:
    x, y = torch.randn(8192, 3, 32, 32), torch.randint(0, 10, (8192,))
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64, 10))
    return Work(model, TensorDataset(x, y), nn.CrossEntropyLoss(), 256, 60)


def rates(make: Callable[[], Work], graph: int, repeats: int = 3) -> list[float]:
    """Items per second of each repeat, after three epochs of warm-up."""
    torch.manual_seed(0)
    work = make()
    epochs = work.epochs if graph else max(2, work.epochs // 20)
    plan = hotloop.Plan("cuda", graph=graph, stream="resident", precision="bf16", fused=True)
    optimizer = torch.optim.Adam(work.model.parameters(), 1e-3)
    loop = hotloop.Loop(work.model, optimizer, work.loss, device="cuda", plan=plan)
    loader = DataLoader(work.data, work.batch, shuffle=True)
    loop.fit(loader, epochs=3, progress=False, monitor=False)
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loop.fit(loader, epochs=epochs, progress=False, monitor=False)
        torch.cuda.synchronize()
        found.append(len(work.data) * epochs / (time.perf_counter() - start))
    return found


def main() -> None:
    for make in [make for make in (mlp, cnn) if make.__name__ in (sys.argv[1:] or ("mlp", "cnn"))]:
        for graph in (16, 1, 0):
            print(f"{make.__name__}, graph {graph}:", *(f"{rate:,.0f}" for rate in rates(make, graph)), flush=True)


if __name__ == "__main__":
    main()
