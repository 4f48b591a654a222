"""A training with batch normalisation: `normalising.py PARALLEL`, which prints what it holds when it is evaluated."""

import sys
from typing import Any

import torch
from scenes import RANK, loader, rows
from torch import nn
from torch.utils.data import DataLoader

import hotloop

torch.manual_seed(RANK)
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 5))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), plan=hotloop.Plan("cpu", parallel=sys.argv[1]))


def held() -> list[float]:
    return [float(buffer.double().sum()) for buffer in model.buffers()]


def on_step(record: Any) -> str | None:
    if record.step == 8:
        print("in an epoch", loop.evaluate(DataLoader(rows(), 7)), held())
    return "stop" if record.step == 13 else None


loop.fit(
    loader(rows()),
    epochs=9,
    validate=DataLoader(rows(), 7),
    progress=False,
    monitor=False,
    on_step=on_step,
    on_epoch=lambda record: print("after an epoch", record.epoch.metrics, held()),
)
print("at the end", held())
