"""What the start of a run costs: short runs in new processes, by the tutorial's loop and by `Loop(…).fit(…)`.

    python benchmarks/starts.py cnn resnet18 llama --seconds 1,2 --out benchmarks/results/starts.json

Every run has a process of its own with nothing in the caches, and trains as many items as the tutorial's loop does in
so many seconds once it runs. The clock counts everything from there on: moving the model, the data, the first step, in
which libraries load, and plans. Processes of a workload start together and run by turns, each alone.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hotloop
from harness.about import facts
from harness.contestants import contestants
from harness.contestants.hot import in_words, loop_of
from harness.end_to_end import CACHES, of_length, pace_of
from harness.workloads import WORKLOADS, workload
from hotloop.device.clock import synchronize
from hotloop.records.files import write_json

KINDS = ("tutorial", "default")
PACE = 3.0  # seconds of the tutorial's loop that its rate is taken from


@dataclass(frozen=True)
class Start:
    """A run of one workload and length."""

    workload: str
    length: float  # seconds of the tutorial's loop once it runs
    items: int
    tutorial: list[float]  # seconds of each turn
    default: list[float]
    plan: str  # of the last turn

    @property
    def times(self) -> float:
        return statistics.median(self.tutorial) / statistics.median(self.default)


def rate(name: str, device: torch.device, quick: bool) -> dict[str, Any]:
    """Items per second of the tutorial's loop once it runs."""
    work = workload(name, device, quick=quick)
    steps = contestants(["tutorial"])["tutorial"](work.parts(), device).steps
    assert steps is not None
    list(itertools.islice(steps(), 3 if quick else 10))
    return {"rate": pace_of(steps(), work, device, PACE * (0.01 if quick else 1)).items_per_second}


def run(name: str, device: torch.device, quick: bool, kind: str) -> dict[str, Any]:
    """Train on about as many items as a first line says, when a second one comes in."""
    whole = workload(name, device, quick=quick)
    if not (line := sys.stdin.readline()):
        raise SystemExit(1)  # the one that would have told is gone, and says why
    work, epochs = of_length(whole, float(line))
    parts, start = work.parts(), contestants(["tutorial"])["tutorial"]
    torch.ones(1, device=device)  # the driver is there, as in any script that has asked for the device
    synchronize(device)
    print("ready", flush=True)
    sys.stdin.readline()
    clock, words = time.perf_counter(), ""
    if kind == "tutorial":
        steps = start(parts, device).steps
        assert steps is not None
        for _ in itertools.islice(steps(), epochs * -(-work.items // work.batch)):
            pass
    else:
        loop = loop_of(parts, device, "auto")
        loop.fit(parts.loader, epochs=epochs, device_transform=parts.device_transform, progress=False)
        words = in_words(loop.plan)
    synchronize(device)
    return {"seconds": time.perf_counter() - clock, "items": epochs * work.items, "plan": words}


class Process:
    """This file in a process of its own, with caches of its own."""

    def __init__(self, *told: object, folder: Path) -> None:
        caches = {name: tempfile.mkdtemp(dir=folder) for name in CACHES}
        command = [sys.executable, __file__, "--one", *map(str, told)]
        self._process = subprocess.Popen(  # noqa: S603  # this very file
            command, env=os.environ | caches, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def prepare(self, items: float) -> None:
        """Tell it how many items there are, and wait until it could begin."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # `result` tells of one that has ended
            self._process.stdin.write(f"{items}\n")
            self._process.stdin.flush()
        while (line := self._process.stdout.readline()) and line != "ready\n":
            pass

    def result(self) -> dict[str, Any]:
        """Let it begin; returns what it printed last."""
        told, _ = self._process.communicate("go\n")
        if self._process.returncode:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended with {self._process.returncode}")  # type: ignore[arg-type]
        return json.loads(told.splitlines()[-1])  # type: ignore[no-any-return]


def measured(name: str, seconds: Sequence[float], turns: int, told: list[str], folder: Path) -> Iterator[Start]:
    """One workload in all lengths: the turns of both loops, one after the other."""
    order = KINDS * turns
    first = Process(name, *told, folder=folder)
    every = [[Process(name, *told, "--kind", kind, folder=folder) for kind in order] for _ in seconds]
    pace = first.result()["rate"]
    for length, processes in zip(seconds, every, strict=True):
        for process in processes:
            process.prepare(pace * length)
        found = [process.result() for process in processes]
        tutorial, default = ([each["seconds"] for each in found[turn::2]] for turn in range(2))
        yield Start(name, length, found[0]["items"], tutorial, default, found[-1]["plan"])


def lengths(words: str) -> list[float]:
    """Seconds, separated by commas."""
    found = [float(word) for word in words.split(",")]
    if not all(0 < seconds < math.inf for seconds in found):
        raise ValueError(words)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help="as `python -m harness` names them")
    parser.add_argument("--seconds", type=lengths, default=[1.0, 2.0], help="of the tutorial's loop, such as 1,2")
    parser.add_argument("--turns", type=int, default=3, help="of each loop")
    parser.add_argument("--device", help="such as cpu; by default the best there is")
    parser.add_argument("--quick", action="store_true", help="tiny workloads, to see that it runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.out is not None and not given.out.parent.is_dir():
        parser.error(f"--out: there is no folder {given.out.parent}")
    if given.turns < 1:
        parser.error(f"--turns {given.turns}: at least 1")
    if unknown := set(given.workloads) - {*WORKLOADS}:
        parser.error(f"there is no workload {min(unknown)!r}; there are {', '.join(WORKLOADS)}")
    try:
        device = hotloop.pick(given.device or "auto").device
    except hotloop.HotloopError as error:
        parser.error(f"--device: {error}")
    if given.one:
        told = (given.workloads[0], device, given.quick)
        print(json.dumps(run(*told, given.kind) if given.kind else rate(*told)))
        return
    options = ["--device", str(device), *["--quick"] * given.quick]
    about = facts([device])
    console, starts = Console(), list[Start]()
    with tempfile.TemporaryDirectory(prefix="hotloop-starts-") as folder:
        for name in given.workloads:
            for start in measured(name, given.seconds, given.turns, options, Path(folder)):
                starts.append(start)
                words = f"{name}, {start.length:g} s: {start.times:.2f} times the tutorial's loop"
                console.print(words, highlight=False)
                if given.out:  # what was measured stays, whatever happens to the rest
                    write_json(given.out, about | {"starts": [asdict(each) | {"times": each.times} for each in starts]})
    table = Table("workload", "run of", "tutorial", "default", "times", "plan")
    for each in starts:
        both = (", ".join(f"{one:.2f} s" for one in seconds) for seconds in (each.tutorial, each.default))
        table.add_row(each.workload, f"{each.length:g} s", *both, f"{each.times:.2f}", each.plan)
    console.print(table)


if __name__ == "__main__":
    main()
