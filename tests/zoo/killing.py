"""A script: trainings of the zoo, killed at random moments and begun again until they are done.

Each attempt is a fork, so that torch is imported once; this process itself never trains. After some calls of modules
it sets a timer of the system that nothing handles, which ends it at whatever it is doing then: on a busy machine, too.
Prints a JSON object.
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
import torch._dynamo  # which the first optimizer of each attempt would import
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from trainings import ZOO, Killed, Training, differences

EPOCHS = 15 if os.environ.get("HOTLOOP_TEST_RANDOM") else 8
KILLS = 2


class Calls:
    """Counts the calls of modules in this process, and kills it soon after the last one that it is to make."""

    def __init__(self, last: int | None = None, part: float = 0.0) -> None:
        self.made = 0
        self._last, self._part = last, part
        register_module_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, given: object) -> None:
        self.made += 1
        if self.made == self._last:
            signal.setitimer(signal.ITIMER_PROF, self._part * time.process_time() / self.made)


def train(training: Training, folder: Path | None, result: Path, *kill: Any) -> None:
    """To the end, or until the process is killed."""
    calls, parts = Calls(*kill), training.build()
    saving: dict[str, Any] = {"save": folder, "every": "3 steps", "resume": True} if folder else {}
    loop = parts.loop("plain", parts.halt(10**6, Killed))
    options: dict[str, Any] = {"device_transform": parts.transform, "progress": False, "monitor": False}
    loop.fit(parts.loader, epochs=EPOCHS, **options, **saving)
    torch.save((parts.everything(), calls.made), result.with_suffix(".part"))
    result.with_suffix(".part").rename(result)


def forked(work: Callable[[], None]) -> int:
    """The exit status of work in a process of its own."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001  # this process must not go on
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_and_resumed(training: Training, folder: Path, dice: random.Random) -> dict[str, Any]:
    if forked(lambda: train(training, None, folder / "never")):
        return {"error": "the run that is not killed failed"}
    never, calls = torch.load(folder / "never", weights_only=False)
    for _ in range(KILLS):
        kill = (round(dice.uniform(0.1, 0.4) * calls), dice.uniform(0.01, 10))
        status = forked(lambda kill=kill: train(training, folder / "run", folder / "often", *kill))  # type: ignore[misc]
        if status != -signal.SIGPROF:
            return {"error": f"it ended with {status} instead of being killed"}
    if forked(lambda: train(training, folder / "run", folder / "often")):
        return {"error": "the run that went on failed"}
    often, _ = torch.load(folder / "often", weights_only=False)
    return {"differences": differences(often, never)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    here, names = Path(sys.argv[1]), sys.argv[2:]
    found = {}
    for training in (each for each in ZOO if each.name in names):
        (here / training.name).mkdir()
        dice = random.Random(training.name)  # noqa: S311
        found[training.name] = killed_and_resumed(training, here / training.name, dice)
    print(json.dumps(found))
