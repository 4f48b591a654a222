"""One training that is killed again and again with SIGKILL, while it saves too, against one that never was.

python benchmarks/kills.py --kills 50 --json benchmarks/results/kills_cpu.json

Each life of the training is a process of its own, which goes on from the last checkpoint of the one before and saves
every other step, so that much of the time a save is in progress. The moments of the kills are drawn from a seed. At the
end everything is compared that decides how training would go on: weights, buffers, the optimizer, the schedule, losses
and random states.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from harness.about import facts
from hotloop.checkpoint.codec import pack
from hotloop.records.files import write_json

BATCHES = 16  # of an epoch
STEPS = 32  # of the run, for each kill
STARTS = 0.2  # share of the kills that come while a life is still reading its checkpoint


def build(epochs: int) -> tuple[hotloop.Loop, DataLoader[Any]]:
    """A network whose checkpoints take a while to write, with all that has a state of its own."""
    torch.manual_seed(0)
    random.seed(0)  # a fork seeds it anew
    inputs = torch.randn(BATCHES * 16 - 5, 64)
    model = nn.Sequential(nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=epochs * BATCHES)
    loop = hotloop.Loop(
        model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain", scheduler=schedule, clip_norm=1.0
    )
    return loop, DataLoader(TensorDataset(inputs, inputs.argmax(1)), 16, shuffle=True)


def live(epochs: int, folder: Path | None, pipe: int) -> None:
    """One life of the training: says when a step begins, and at the end how it ended."""
    loop, loader = build(epochs)
    plain = loop.step

    def step(batch: Any) -> torch.Tensor:
        os.write(pipe, b"step\n")
        return plain(batch)

    loop.step = step  # type: ignore[method-assign]
    saving: dict[str, Any] = {} if folder is None else {"save": folder, "every": "2 steps", "resume": True}
    report = loop.fit(loader, epochs=epochs, progress=False, **saving)
    tensors, state = pack(loop.state_dict())
    told = hashlib.sha256(json.dumps(state).encode())
    for name, tensor in sorted(tensors.items()):
        told.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    ending = {"sha256": told.hexdigest(), "steps": report.steps, "resumed": report.resumed, "saving": report.saving}
    os.write(pipe, json.dumps(ending).encode() + b"\n")


def begin(epochs: int, folder: Path | None) -> tuple[int, Any]:
    """A life in a process of its own, and what it tells."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, os.fdopen(reader)
    try:
        live(epochs, folder, writer)
    except BaseException as error:  # noqa: BLE001  # a forked process must not go on as its parent
        print(f"a life failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def to_the_end(epochs: int, folder: Path | None) -> dict[str, Any]:
    child, told = begin(epochs, folder)
    with told:
        *_, last = [*told] or [""]
    os.waitpid(child, 0)
    if not last.startswith("{"):
        raise SystemExit("the training failed")
    ending: dict[str, Any] = json.loads(last)
    return ending


def kill_one(epochs: int, folder: Path, dice: random.Random, step: float) -> bool:
    """Begin a life and kill it after some steps, which take so many seconds; whether it was saving."""
    child, told = begin(epochs, folder)
    with told:
        steps = 0 if dice.random() < STARTS else dice.randint(1, STEPS * 3 // 4)
        for _ in range(steps):
            told.readline()
        time.sleep(dice.uniform(0, 4 * step))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit("a life ended by itself; the run is too short for so many kills")
    return any(folder.glob(".saving-*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; without one, a new one each time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a process that has started threads cannot be forked safely
    build(1)  # which imports what every life would have to import again
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    dice = random.Random(seed)  # noqa: S311  # nothing is to be kept secret
    epochs = max(2, STEPS * arguments.kills // BATCHES)
    start = time.perf_counter()
    whole = to_the_end(epochs, None)
    step = (time.perf_counter() - start) / whole["steps"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        saving = sum(kill_one(epochs, folder, dice, step) for _ in range(arguments.kills))
        killed = to_the_end(epochs, folder)
    found = {
        **facts([torch.device("cpu")]),
        "seed": seed,
        "kills": arguments.kills,
        "kills during a save": saving,
        "lives": arguments.kills + 1,
        "lives that went on from a checkpoint": killed["resumed"],
        "steps": killed["steps"],
        "bit-equal to the run that was never killed": killed["sha256"] == whole["sha256"],
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(found, indent=1))
    if arguments.json:
        write_json(arguments.json, found)
    if killed["sha256"] != whole["sha256"] or killed["steps"] != whole["steps"]:
        raise SystemExit(f"the run that was killed ended otherwise (seed {seed})")


if __name__ == "__main__":
    main()
