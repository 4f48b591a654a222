"""One script as it is started in four ways: alone, by torchrun as one process, and by torchrun as two that share the
device, with DDP and with FSDP2. Its losses, its steps per second and the memory of each rank.

    python benchmarks/ranks.py --out benchmarks/results/ranks.json

Two processes that share a GPU talk over gloo, through the host: that says whether the script works and what a rank
holds, and nothing about speed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.bench.about import commit, hardware, versions

WAYS = {
    "alone": (0, "ddp"),
    "torchrun, 1 process": (1, "ddp"),
    "torchrun, 2 processes, DDP": (2, "ddp"),
    "torchrun, 2 processes, FSDP2": (2, "fsdp"),
}
TURNS = 3  # of each way, one after the other
SIZES = {"cuda": (1024, 12, 16, 256), "cpu": (64, 2, 2, 32)}  # width, blocks, heads, tokens


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.between(x))


class SmallGPT(nn.Module):
    def __init__(self, width: int, blocks: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(512, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


def script(out: Path, device: str, parallel: str, steps: int) -> None:
    """What a person would write; it does not know how it is started."""
    torch.manual_seed(0)
    kind = torch.device(device).type
    size = SIZES[kind]
    model = SmallGPT(*size)
    world = hotloop.world_size()
    data = torch.randint(512, (8 * steps, size[-1] + 1))
    loader = DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), 8 // world, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    plan = hotloop.Plan(device, parallel=parallel if world > 1 else "ddp")  # type: ignore[arg-type]
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device=device, plan=plan)
    loop.fit(loader, epochs=1, progress=False, monitor=False)
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    report = loop.fit(loader, epochs=2, progress=False, monitor=False)
    if kind == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    memory = {}
    if kind == "cuda":
        memory = {"held": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
    record = {
        "rank": int(os.environ.get("RANK", "0")),
        "losses": [epoch.loss for epoch in report.epochs],
        "steps_per_second": 2 * steps / seconds,
        "memory": memory,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (out / f"{record['rank']}.json").write_text(json.dumps(record))


def run(ranks: int, parallel: str, device: str, steps: int) -> list[dict[str, Any]]:
    """Start the script as so many processes, and read what each has written."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as torchrun sets it for several
        launcher = [sys.executable]
        if ranks:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launcher, __file__, "--script", folder, "--device", device, "--parallel", parallel]
        done = subprocess.run(  # noqa: S603  # this file
            [*command, "--steps", str(steps)], check=False, capture_output=True, text=True, timeout=240, env=environment
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        return [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=64, help="of an epoch; the second and third are timed")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    parser.add_argument("--script", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parallel", default="ddp", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.script:
        script(given.script, given.device, given.parallel, given.steps)
        return
    seen: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in WAYS}
    for turn in range(TURNS):
        for name, (ranks, parallel) in WAYS.items():
            if turn == 0 or ranks < 2:
                steps = given.steps if ranks < 2 else max(2, given.steps // 16)  # gradients go through the host
                seen[name].append(run(ranks, parallel, given.device, steps))
    rows = []
    for name, turns in seen.items():
        rates = [max(rank["steps_per_second"] for rank in turn) for turn in turns]
        rows.append({"way": name, "steps_per_second": statistics.median(rates), "all": rates, "ranks": turns[0]})
        held = [
            f"{rank['memory'].get('held', 0) / 2**20:.0f}/{rank['memory'].get('peak', 0) / 2**20:.0f} MiB"
            for rank in turns[0]
        ]
        print(f"{name:30} {statistics.median(rates):8.2f} steps/s, held/peak {held}, losses {turns[0][0]['losses']}")
    record = {
        "hardware": hardware([torch.device(given.device)]),
        "command": "python benchmarks/ranks.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "rows": rows,
    }
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
