"""A training in which the last of the ranks does something else: `drifting.py SCENE FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import torch
from scenes import RANK, RANKS, loader, network, rows
from torch import nn

import hotloop

scene, folder = sys.argv[1], Path(sys.argv[2])
IS_ODD = RANK == RANKS - 1 and scene != "none"
torch.manual_seed(RANK)
model = nn.Sequential(network(), nn.Dropout(0.2 if IS_ODD and scene == "dropout" else 0.1))
rate = 0.02 if IS_ODD and scene == "rate" else 0.01
optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": rate}], 0.1, momentum=0.9)
loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")


def on_step(record: Any) -> None:
    if IS_ODD and record.step == 3:
        if scene in ("writes", "saves"):
            with torch.no_grad():
                next(iter(model.parameters()))[0, 0] += 0.5
        if scene == "rounds":
            with torch.no_grad():
                next(iter(model.parameters())).mul_(1 + 1e-6)


data = loader(rows())
if scene == "loop":
    for _ in range(2):
        for number, batch in enumerate(loop.batches(data)):
            loop.step(batch)
            if IS_ODD and number == 2:
                model[0][0].weight.data.mul_(1.5)
else:
    options: Any = {"save": folder, "every": "4 steps"} if scene == "saves" else {}
    loop.fit(data, epochs=2, progress=False, monitor=False, on_step=on_step, **options)
print("ended")
