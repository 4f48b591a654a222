"""A training that is stopped between two epochs, where the first rank cannot write the last checkpoint at first."""

import sys
from pathlib import Path
from typing import Any

import torch
from scenes import RANK, loader, network, rows
from torch import nn

import hotloop
from hotloop.checkpoint.store import Store

write, failed = Store.write, []


def failing(*args: Any, **options: Any) -> Any:
    if not failed:
        failed.append(1)
        raise OSError(28, "No space left on device")
    return write(*args, **options)


if RANK == 0:
    Store.write = failing
model = network()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")
where = Path(sys.argv[1])
loop.fit(loader(rows()), epochs=3, save=where, progress=False, monitor=False, on_epoch=lambda record: "stop")
print(loop.steps, [int(path.name.removeprefix("step-")) for path in where.glob("step-*")])
