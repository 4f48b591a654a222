"""Predict, without a GPU, what trainings will take on one: memory, step time, whether they fit, the largest batch.

python benchmarks/predictions/predict.py --json benchmarks/results/predictions_h200.json
python benchmarks/predictions/predict.py --json benchmarks/results/predictions_h200.json --largest

The file is written after each training, and what it holds already is not predicted again. It is to be committed before
`measure.py` is run. A cap is what the allocator may reserve, as `torch.cuda.set_per_process_memory_fraction` has it.
"""

import argparse
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from cases import CAPS, GIB, STEPS, Training, chosen

from harness.about import commit, versions
from hotloop.apps.simulate.cards import Card, card
from hotloop.apps.simulate.largest_batch import Outcome, largest
from hotloop.apps.simulate.library_memory import constants_for
from hotloop.apps.simulate.running import Simulator
from hotloop.apps.simulate.simulation_record import Simulation
from hotloop.apps.simulate.table import load
from hotloop.errors import HotloopError
from hotloop.records.files import write_json

CAPPED = Path(__file__).with_name("capped.py")
LIMIT = 600.0  # seconds for one simulation on a slow machine
Job = Callable[[Simulator], None]


class Failed(Exception):
    """A training could not be simulated as it should."""


@dataclass
class Book:
    """The predictions so far, kept in a file."""

    path: Path
    on: Card
    data: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.data = json.loads(self.path.read_text())
        self.data.setdefault("predictions", {})
        self.data.setdefault("largest", {})
        constants = constants_for(self.on, torch.__version__)
        self.data |= {
            "card": self.on.key,
            "margin": constants.margin,
            "calibrated": {"memory": constants.calibrated, "time": load(self.on.architecture).card == self.on.key},
            "versions": versions(),
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def note(self, part: str, key: str, found: dict[str, Any]) -> None:
        with self.lock:
            self.data[part][key] = found
            write_json(self.path, self.data)


def simulate(simulator: Simulator, case: Training, batch: int, on: Card, cap: int | None = None) -> Simulation:
    """A few steps of a training, under a cap in bytes where one is given; only to run out of memory may go wrong."""
    script, arguments = case.script, ["--batch", str(batch), "--steps", str(STEPS)]
    if cap is not None:
        script, arguments = CAPPED, [str(cap), str(case.script), *arguments]
    found = simulator.run(script, arguments, on, steps=STEPS, time_limit=LIMIT)
    wrong = [finding.code for finding in found.findings if finding.code != "out-of-memory"]
    if wrong or (found.completed < STEPS and not ran_out(found)):
        raise Failed(f"{case.name} with a batch of {batch}: {wrong or found.error or found.notes}")
    return found


def ran_out(found: Simulation) -> bool:
    return any(finding.code == "out-of-memory" for finding in found.findings)


def verdict(run: Callable[[int], Simulation], plain: Simulation, cap: int, margin: float) -> bool | None:
    """Whether it fits under a cap; None where a margin of the cap more or less would change the answer.

    What never reserves as much as the cap does not notice it, so that no other run is needed.
    """
    assert plain.peak is not None
    found = plain if plain.peak.reserved <= cap else run(cap)
    if ran_out(found):
        return None if not ran_out(run(int(cap * (1 + margin)))) else False
    assert found.peak is not None
    return True if found.peak.allocated <= cap * (1 - margin) else None


def predict(simulator: Simulator, case: Training, batch: int, book: Book) -> dict[str, Any]:
    began = time.monotonic()
    plain = simulate(simulator, case, batch, book.on)
    if ran_out(plain) or plain.peak is None or plain.step_ms is None:
        raise Failed(f"{case.name} with a batch of {batch} gave no figures")
    margin = float(book.data["margin"])
    fits = {
        str(cap): verdict(lambda most: simulate(simulator, case, batch, book.on, most), plain, cap * GIB, margin)
        for cap in CAPS
    }
    return {
        "training": case.name,
        "batch": batch,
        **plain.peak.to_json(),
        "interval": plain.interval.to_json() if plain.interval is not None else None,
        "categories": plain.categories,
        "step_ms": plain.step_ms.to_json(),
        "fits": fits,
        "notes": plain.notes,
        "seconds": round(time.monotonic() - began, 1),
    }


def predict_largest(simulator: Simulator, case: Training, cap: int, book: Book) -> dict[str, Any]:
    began = time.monotonic()

    def run(batch: int) -> Outcome:
        found = simulate(simulator, case, batch, book.on, cap * GIB)
        full = ran_out(found) or found.peak is None
        return Outcome(not full, None if full or found.peak is None else found.peak.allocated, cap * GIB)

    found = largest(run, case.batches[0])
    return {
        "training": case.name,
        "cap": cap,
        "batch": found.batch,
        "too_large": found.too_large,
        "runs": found.runs,
        "seconds": round(time.monotonic() - began, 1),
    }


def jobs_of(cases: list[Training], book: Book, *, of_largest: bool) -> dict[str, Job]:
    """What is still to be done, by words for it."""
    jobs: dict[str, Job] = {}
    for case in cases:
        for number in case.largest_under if of_largest else case.batches:
            key = f"{case.name} {number}"
            part = "largest" if of_largest else "predictions"
            if key not in book.data[part]:
                jobs[key] = _job(predict_largest if of_largest else predict, part, key, case, number, book)
    return jobs


def _job(how: Callable[..., dict[str, Any]], part: str, key: str, case: Training, number: int, book: Book) -> Job:
    def job(simulator: Simulator) -> None:
        book.note(part, key, how(simulator, case, number, book))

    return job


def work(jobs: dict[str, Job], workers: int) -> list[str]:
    """Do all jobs, each worker with a process of its own; what went wrong, in words."""
    waiting: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for number, key in enumerate(jobs, 1):
        waiting.put((number, key))
    wrong: list[str] = []

    def worker() -> None:
        with Simulator(stdout=subprocess.DEVNULL) as simulator:
            while True:
                try:
                    number, key = waiting.get_nowait()
                except queue.Empty:
                    return
                began = time.monotonic()
                try:
                    jobs[key](simulator)
                    print(f"{number} of {len(jobs)}: {key}, {time.monotonic() - began:.0f} s", flush=True)
                except (Failed, HotloopError) as error:
                    wrong.append(str(error))
                    print(f"{number} of {len(jobs)}: {key} failed", flush=True)

    threads = [threading.Thread(target=worker) for _ in range(min(workers, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="what is there already is kept")
    parser.add_argument("--largest", action="store_true", help="the largest batches instead, which take many runs each")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings alone")
    parser.add_argument("--card", default="h200")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    book = Book(arguments.json, card(arguments.card))
    jobs = jobs_of(chosen(arguments.only), book, of_largest=arguments.largest)
    wrong = work(jobs, arguments.workers)
    for words in wrong:
        print(f"failed: {words}")
    print(f"{len(jobs) - len(wrong)} of {len(jobs)} predicted")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
