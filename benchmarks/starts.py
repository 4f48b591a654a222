"""What the start of a run costs: the tuner with nothing known, and with the plan of an earlier run.

python benchmarks/starts.py cnn --seconds 90 --json benchmarks/results/starts.json

Two processes train the same workload with `plan="auto"`, one after the other, with one cache of plans. The first also
shows that training goes on while a compilation is prepared: the steps that ran meanwhile, and when it was adopted.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import hotloop
from hotloop.bench.workloads import workload
from hotloop.levers import levers_of
from hotloop.tune.tuner import Tuner


def train(name: str, seconds: float, quick: bool) -> dict[str, Any]:
    """Train for so many seconds; how long the tuner held training up, and what happened when."""
    device = hotloop.pick().device
    parts = workload(name, device, quick=quick).parts()
    loop = hotloop.Loop(parts.model, parts.optimizer, parts.loss, objective=parts.objective, device=device)
    held: list[dict[str, Any]] = []
    stalls: list[dict[str, float]] = []
    look, step = Tuner.look, hotloop.Loop.step
    start = time.perf_counter()

    def timed_look(self: Tuner, *arguments: Any) -> None:
        began, before = time.perf_counter(), loop.plan
        look(self, *arguments)
        taken = time.perf_counter() - began
        if taken > 0.01 or loop.plan != before:
            entry = {"at": began - start, "step": loop.steps, "seconds": taken, "levers": levers_of(loop.plan)}
            held.append({**entry, "still open": self.is_busy})

    def timed_step(self: hotloop.Loop, batch: Any) -> torch.Tensor:
        began = time.perf_counter()
        result = step(self, batch)
        taken = time.perf_counter() - began
        if taken > 0.3:
            stalls.append({"at": began - start, "step": loop.steps, "seconds": taken})
        return result

    Tuner.look, hotloop.Loop.step = timed_look, timed_step  # type: ignore[method-assign]
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    report = loop.fit(parts.loader, epochs=10**6, progress=False)
    rates = [epoch.items / epoch.seconds for epoch in report.epochs if epoch.seconds]
    return {
        "tuner held training up": held,
        "single calls over 0.3 s": stalls[:8],
        "steps": loop.steps,
        "items per second, first and last epochs": [rates[0], rates[-1]] if rates else [],
        "levers": levers_of(loop.plan),
        "trials": [f"{t.lever}: {t.verdict} ({t.why})" for t in loop.tuning.trials] if loop.tuning else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="cnn")
    parser.add_argument("--seconds", type=float, default=90, help="of the first run; the second takes a third")
    parser.add_argument("--quick", action="store_true", help="a tiny workload, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(train(arguments.workload, arguments.seconds, arguments.quick)))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name, seconds in (("nothing known", arguments.seconds), ("plan known", arguments.seconds / 3)):
            command = [sys.executable, __file__, arguments.workload, "--one", "--seconds", str(seconds)]
            command += ["--quick"] * arguments.quick
            done = subprocess.run(  # noqa: S603  # this very file
                command, env={**os.environ, "HOTLOOP_CACHE": cache}, check=True, stdout=subprocess.PIPE, text=True
            )
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name}:\n{json.dumps(found[name], indent=1)}")
    if arguments.json:
        choice = hotloop.pick()
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "device": choice.name or str(choice.device)}
        found = {**about, "torch": torch.__version__, "workload": arguments.workload, **found}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
