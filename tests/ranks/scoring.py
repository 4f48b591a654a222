"""A training with metrics that is stopped in an epoch and goes on, beside one that is not: `scoring.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import torch
from scenes import accuracy, loader, network, rows
from torch import nn

import hotloop


def scores(name: str, stop: int = 0) -> list[dict[str, float]]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loop = hotloop.Loop(
        model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain", train_metrics={"accuracy": accuracy}
    )

    def on_step(record: Any) -> str | None:
        return "stop" if record.step == stop else None

    where = Path(sys.argv[1], name)
    report = loop.fit(loader(rows()), epochs=2, save=where, resume=True, progress=False, monitor=False, on_step=on_step)
    assert bool(report.stopped) == bool(stop)
    return [dict(epoch.train_metrics) for epoch in report.epochs]


whole = scores("whole")
scores("stopped", stop=1)
assert scores("stopped") == whole, whole
