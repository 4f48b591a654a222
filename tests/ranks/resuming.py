"""A training that saves, and goes on from what it finds: `resuming.py FOLDER NAME [RANK STEP [SIGNAL]]`.

Until it is resumed, a run with "slowly" in its name has a checkpoint of nearly every step; at the step, the rank sends
itself the signal, when there is one.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenes import BACKEND, GLOBAL, IN_GROUP, RANK, RANKS, network, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hotloop
from hotloop.ranks import heartbeat

heartbeat.PERIOD, heartbeat.BEAT_PATIENCE = 0.25, 1.5  # seconds; as many rounds of words as ever, in less time
folder, name, *rest = sys.argv[1:]
where = Path(folder)
saved, steps = where / f"saved {name}", []
is_new = not saved.exists()


def objective(model: nn.Module, batch: Any) -> Tensor:
    if model.training:
        steps.append(1)
        time.sleep(0.05 * ("slowly" in name and is_new))
        if rest and is_new and (RANK, len(steps)) == (int(rest[0]), int(rest[1])):
            while not any(saved.glob("step-*")):  # its writer is a thread beside the training
                time.sleep(0.02)
            os.kill(os.getpid(), signal.Signals[rest[2] if len(rest) > 2 else "SIGKILL"])
    x = batch[0]
    if model.training and "without dropout" not in name:
        x = x * random.uniform(0.9, 1.1)  # noqa: S311  # by a generator that is another on each rank
    return nn.functional.cross_entropy(model(x), batch[1])


if BACKEND:
    dist.init_process_group(BACKEND)
torch.manual_seed(3 + RANK)
random.seed(3 + RANK)
dropout = [] if "without dropout" in name else [nn.Dropout(0.2)]
model = network(nn.Tanh(), *dropout)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200)
plan = hotloop.Plan("cpu", parallel="fsdp") if "fsdp" in name and IN_GROUP else "plain"
loop = hotloop.Loop(model, optimizer, objective=objective, scheduler=scheduler, plan=plan)
loader = DataLoader(rows(), GLOBAL // RANKS, shuffle=True)
report = loop.fit(
    loader,
    epochs=3,
    validate=DataLoader(rows(), 11),
    save=saved,
    every="1 steps" if "slowly" in name else "2 steps",
    resume=True,
    progress=False,
    monitor=False,
)
end = where / f"end {name} {RANKS} {RANK}"
torch.save(loop.state_dict()["model"], end.with_suffix(".pt"))
told = {
    "epochs": [{"loss": epoch.loss, "items": epoch.items, **epoch.metrics} for epoch in report.epochs],
    "steps": report.steps,
    "resumed": report.resumed,
    "stopped": report.stopped,
    "host": os.uname().nodename,
}
end.with_suffix(".json").write_text(json.dumps(told))
