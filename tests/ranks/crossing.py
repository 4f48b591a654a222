"""A training over two hosts that saves and goes on from what it finds: `crossing.py FOLDER NAME SECONDS [RANK STEP]`.

Up to a restart a step takes so many seconds; at the step, the rank ends as by the kernel.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from scenes import GLOBAL, network, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hotloop
from hotloop.ranks import heartbeat

heartbeat.PERIOD, heartbeat.BEAT_PATIENCE = 0.5, 2.0  # seconds; as many rounds of words as ever, in less time
RANK = int(os.environ["RANK"])  # of this process, not of the one that it is a fork of
folder, name, seconds, *kill = sys.argv[1:]
place = Path(folder, f"{name} {RANK} at")  # which holds the number of steps of this process
place.write_text("0")
killed = Path(folder, f"{name} was killed")
saved = Path(folder, f"saved {name}")
is_restarted = saved.exists()


def objective(model: nn.Module, batch: Any) -> Tensor:
    if model.training:
        steps = int(place.read_text()) + 1
        if not is_restarted:
            time.sleep(float(seconds))
        place.write_text(str(steps))
        if kill and (RANK, steps) == tuple(map(int, kill)) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


torch.manual_seed(3 + RANK)
model = network(nn.Tanh(), nn.Dropout(0.2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
loop = hotloop.Loop(model, optimizer, objective=objective, device="cpu", plan="plain")
report = loop.fit(
    DataLoader(rows(items=131), GLOBAL // 2, shuffle=True),
    epochs=3,
    validate=DataLoader(rows(), 11),
    save=saved,
    every="2 steps",
    resume=True,
    progress=False,
    monitor=False,
)
end = {"model": model.state_dict(), "resumed": report.resumed, "host": os.uname().nodename}
torch.save(end, Path(folder, f"{name} {RANK}.pt"))
