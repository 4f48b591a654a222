"""What checkpoints cost a training while it runs: GPT of 124 million parameters, with and without `save=`.

python benchmarks/checkpoint_stall.py --json benchmarks/results/checkpoint_stall.json

Runs with and without checkpoints take turns. An epoch is a second or so; what the epochs with a save in them take
longer than the median epoch without is what the checkpoints cost, host and device together, shared out to one a minute.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from harness.about import facts
from harness.models import GPT, GPTSize
from hotloop.checkpoint.store import Store
from hotloop.records.files import write_json


def objective(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    tokens = batch[0]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(device: torch.device, size: GPTSize, texts: Tensor, seconds: float, save: Path | None, every: float) -> Any:
    torch.manual_seed(0)
    model = GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    on_gpu = device.type == "cuda"
    plan = hotloop.Plan(str(device), precision="bf16" if on_gpu else "fp32", fused=on_gpu, graph=int(on_gpu))
    loop = hotloop.Loop(model, optimizer, objective=objective, device=device, plan=plan)
    loader = DataLoader(TensorDataset(texts), 16, shuffle=True)
    where: dict[str, Any] = {} if save is None else {"save": save, "every": every}
    return loop.fit(loader, epochs=10**6, progress=False, time_limit=seconds, **where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of each run")
    parser.add_argument("--quick", action="store_true", help="a tiny network, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    choice = hotloop.pick()
    size = GPTSize(2, 2, 64, 32, 128) if arguments.quick else GPTSize()
    seconds = 3.0 if arguments.quick else arguments.seconds
    shape = (64 if arguments.quick else 320, size.context + 1)
    texts = torch.randint(size.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    plain: list[float] = []
    saving: list[float] = []
    stall, saves, written = 0.0, 0, 0
    for _ in range(2):
        plain += [e.seconds for e in train(choice.device, size, texts, seconds, None, 0).epochs[1:-1]]
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            report = train(choice.device, size, texts, seconds, Path(folder), seconds / 4)
            whole = time.perf_counter() - start
            saving += [e.seconds for e in report.epochs[1:-1]]
            stall += report.saving
            saves += 4  # every quarter, and at the end, which is not counted
            latest = Store(folder).load_latest()
            assert latest is not None
            written = sum(file.stat().st_size for file in latest.path.iterdir())
    usual = statistics.median(plain)
    extra = sum(saving) - len(saving) * usual
    found = {
        "bytes of a checkpoint": written,
        "epoch without": usual,
        "spread of epochs without": (max(plain) - min(plain)) / usual,
        "epochs with": len(saving),
        "seconds that a checkpoint costs": extra / saves,
        "of them in submit": stall / saves,
        "share at one a minute": extra / saves / 60,
        "run with its last save": whole,
    }
    print(json.dumps(found, indent=1))
    if arguments.json:
        write_json(arguments.json, facts([choice.device]) | found)


if __name__ == "__main__":
    main()
