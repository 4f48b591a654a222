"""One script as it is started in six ways: alone; by torchrun as one process, without a process group and in one of its
own (NCCL, DDP and FSDP2); and by torchrun as two processes that share the device, with DDP and with FSDP2. Its losses,
its steps per second and the memory of each rank.

    python benchmarks/ranks.py --seconds 150 --out benchmarks/results/ranks.json

Two processes that share a GPU talk over gloo, through the host: that says whether the script works and what a rank
holds, and nothing about speed. Each way is told as soon as it is known, and the file is written again after each. After
the first round, ways of one process are repeated for as long as there is time.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from harness.about import facts
from hotloop.printing.text import plural
from hotloop.scripts.children import Child

TURNS = 5  # of each way of one process, at most
SIZES = {"cuda": (768, 12, 12, 256), "cpu": (64, 2, 2, 32)}  # width, blocks, heads, tokens
EPOCHS = 5  # that are timed, after one that is not; of two processes one
FEW = 4  # steps of an epoch of two processes, whose gradients go through the host; after three, DDP is built


class Way(NamedTuple):
    """How the script is started."""

    processes: int  # 0: by Python alone
    parallel: str = "ddp"
    makes_group: bool = False  # whether the script makes a process group itself


WAYS = {
    "alone": Way(0),
    "torchrun, 1 process": Way(1),
    "torchrun, 1 process, {backend}, DDP": Way(1, "ddp", makes_group=True),
    "torchrun, 1 process, {backend}, FSDP2": Way(1, "fsdp", makes_group=True),
    "torchrun, 2 processes, gloo, DDP": Way(2, "ddp"),
    "torchrun, 2 processes, gloo, FSDP2": Way(2, "fsdp"),
}


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


def script(out: Path, device: str, parallel: str, backend: str, steps: int, epochs: int) -> None:
    """What a person would write; it does not know how it is started."""
    if backend:
        dist.init_process_group(backend)
    torch.manual_seed(0)
    kind = torch.device(device).type
    size = SIZES[kind]
    model = SmallGPT(*size)
    world = hotloop.world_size()
    data = torch.randint(512, (8 * steps, size[-1] + 1))
    loader = DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), 8 // world, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    plan = hotloop.Plan(device, parallel=parallel)  # type: ignore[arg-type]
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device=device, plan=plan)
    loop.fit(loader, epochs=1, progress=False, monitor=False)
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    report = loop.fit(loader, epochs=epochs, progress=False, monitor=False)
    memory = {}
    if kind == "cuda":
        torch.cuda.synchronize()
        memory = {"held": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
    record = {
        "rank": int(os.environ.get("RANK", "0")),
        "in_group": bool(report.by_rank),
        "losses": [epoch.loss for epoch in report.epochs],
        "steps_per_second": [steps / epoch.seconds for epoch in report.epochs],
        "memory": memory,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (out / f"{record['rank']}.json").write_text(json.dumps(record))
    if backend:
        dist.destroy_process_group()


def run(way: Way, device: str, backend: str, steps: int, seconds: float) -> dict[str, Any]:
    """Start the script in one way, and read what each process has written; what failed is told in words."""
    began = time.perf_counter()
    few = way.processes > 1
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable]
        if way.processes:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.processes)]
        what = ["--device", device, "--parallel", way.parallel, "--backend", backend if way.makes_group else ""]
        how = ["--steps", str(FEW if few else steps), "--epochs", str(1 if few else EPOCHS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as torchrun sets it for several
        log = Path(folder, "log")
        with (
            log.open("w") as out,
            Child(
                [*launcher, __file__, "--script", folder, *what, *how], stdout=out, stderr=out, env=environment
            ) as it,
        ):
            code = it.wait(seconds)
        taken = time.perf_counter() - began
        if code != 0:
            why = "it did not end in time" if code is None else f"it ended with {code}"
            lines = log.read_text(errors="replace").strip().splitlines()
            return {"failed": f"{why}: " + "\n".join(lines[-30:]), "seconds": taken}
        return {"ranks": [json.loads(f.read_text()) for f in sorted(Path(folder).glob("*.json"))], "seconds": taken}


def rate(turn: dict[str, Any]) -> float:
    """Steps per second of a turn: the median of its epochs, of the slowest rank."""
    return float(min(statistics.median(rank["steps_per_second"]) for rank in turn["ranks"]))


def told(name: str, turn: dict[str, Any]) -> str:
    """A turn in a line."""
    if "failed" in turn:
        return f"{name:40} FAILED after {turn['seconds']:.0f} s: {turn['failed']}"
    every = [each for rank in turn["ranks"] for each in rank["steps_per_second"]]
    memory = ", ".join(
        f"{rank['memory']['held'] / 2**20:,.0f}/{rank['memory']['peak'] / 2**20:,.0f} MiB"
        for rank in turn["ranks"]
        if rank["memory"]
    )
    held = f", held/peak {memory}" if memory else ""
    loss = turn["ranks"][0]["losses"][0]
    return (
        f"{name:40} {rate(turn):8.2f} steps/s ({min(every):.2f} to {max(every):.2f}){held}, first loss {loss:.6f},"
        f" {turn['seconds']:.0f} s in all"
    )


def summary(seen: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each way: the median of its turns, and how much longer a step takes than alone in the same turns."""
    rows: list[dict[str, Any]] = []
    alone = [rate(turn) if "ranks" in turn else None for turn in seen["alone"]]
    for name, turns in seen.items():
        good = [turn for turn in turns if "ranks" in turn]
        row: dict[str, Any] = {"way": name, "turns": len(good), "failed": [t["failed"] for t in turns if "failed" in t]}
        if good:
            rates = [rate(turn) for turn in good]
            row |= {"steps_per_second": statistics.median(rates), "all": rates, "ranks": good[0]["ranks"]}
            both = [(one, turn) for one, turn in zip(alone, turns, strict=False) if one is not None and "ranks" in turn]
            if rows and both and len(good[0]["ranks"]) == 1:
                longer = [one / rate(turn) - 1 for one, turn in both]
                row |= {"longer": statistics.median(longer), "all_longer": longer}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=48, help="of an epoch, of one process")
    parser.add_argument("--seconds", type=float, default=150.0, help="of all turns together, at most")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    parser.add_argument("--script", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parallel", default="ddp", help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.script:
        script(given.script, given.device, given.parallel, given.backend, given.steps, given.epochs)
        return
    kind = torch.device(given.device).type
    backend = "nccl" if kind == "cuda" else "gloo"
    ways = {name.format(backend=backend): way for name, way in WAYS.items()}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    about = {
        **facts([torch.device(given.device)]),
        "model": dict(zip(("width", "blocks", "heads", "tokens"), SIZES[kind], strict=True)),
    }
    end = time.perf_counter() + given.seconds
    for turn in range(TURNS):
        for name, way in ways.items():
            left = end - time.perf_counter()
            needed = max((each["seconds"] for each in seen[name]), default=0.0)
            is_once = way.processes > 1 or way.parallel == "fsdp"
            if (turn and is_once) or left < max(needed, 1.0):
                continue
            seen[name].append(run(way, given.device, backend, given.steps, left))
            print(told(name, seen[name][-1]), flush=True)
            if given.out:
                record = {**about, "rows": summary(seen)}
                given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in summary(seen):
        words = f"{row['way']:40} {plural(row['turns'], 'turn')}"
        if "longer" in row:
            span = f"{min(row['all_longer']):+.1%} to {max(row['all_longer']):+.1%}"
            words += f": a step takes {row['longer']:+.1%} ({span}) against alone"
        print(words if row["turns"] else f"{row['way']:40} did not run")
    sys.exit(any(row["failed"] or not row["turns"] for row in summary(seen)))


if __name__ == "__main__":
    main()
