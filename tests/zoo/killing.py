"""A script: trainings of the zoo, killed with SIGKILL at random moments and begun again until they are done.

Each attempt is a fork, so that torch is imported once; this process itself never trains. Prints a JSON object.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from trainings import ZOO, Killed, Training, differences

EPOCHS = 15
KILLS = 2


def train(training: Training, folder: Path | None, result: Path) -> None:
    """To the end, or until the process is killed."""
    parts = training.build()
    saving: dict[str, Any] = {"save": folder, "every": "3 steps", "resume": True} if folder else {}
    loop = parts.loop("plain", parts.halt(10**6, Killed))
    options: dict[str, Any] = {"device_transform": parts.transform, "progress": False, "monitor": False}
    loop.fit(parts.loader, epochs=EPOCHS, **options, **saving)
    torch.save(parts.everything(), result.with_suffix(".part"))
    result.with_suffix(".part").rename(result)


def forked(work: Callable[[], None], limit: float | None = None) -> int:
    """The exit status of work in a process of its own, which is killed after so many seconds."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001  # this process must not go on
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if limit is not None:
        time.sleep(limit)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_and_resumed(training: Training, folder: Path, dice: random.Random) -> dict[str, Any]:
    began = time.perf_counter()
    if forked(lambda: train(training, None, folder / "never")):
        return {"error": "the run that is not killed failed"}
    whole = time.perf_counter() - began
    kills = 0
    while not (folder / "often").exists():
        limit = dice.uniform(0.1, 0.7) * whole if kills < KILLS else None
        status = forked(lambda: train(training, folder / "run", folder / "often"), limit)
        kills += status == -signal.SIGKILL
        if status not in (0, -signal.SIGKILL):
            return {"error": f"it ended with {status} after {kills} kills"}
    never, often = (torch.load(folder / name, weights_only=False) for name in ("never", "often"))
    return {"kills": kills, "differences": differences(often, never)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    here, names = Path(sys.argv[1]), sys.argv[2:]
    found = {}
    for training in (each for each in ZOO if each.name in names):
        (here / training.name).mkdir()
        dice = random.Random(training.name)  # noqa: S311
        found[training.name] = killed_and_resumed(training, here / training.name, dice)
    print(json.dumps(found))
