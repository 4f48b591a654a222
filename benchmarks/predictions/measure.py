"""Measure on a real GPU what `predict.py` has predicted for it: about 5 minutes, with the GPU for nobody else.

python benchmarks/predictions/measure.py --predictions benchmarks/results/predictions_h200.json \
    --json benchmarks/results/measurements_h200.json

Each training runs in a process of its own, so that its allocator begins with nothing. Several start together, since
memory does not depend on the load; then they are timed one after another while the others wait. Under a cap those are
run again that reserve more than it. The file is written after each group, and what it holds is not measured again.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from cases import BY_NAME, CAPS, GIB, chosen
from children import Child, Hear, Tell
from watched import Gpu, bracket, fits, quiet, timed

from harness.about import commit, versions
from hotloop.records.files import write_json

TOGETHER = 12  # processes at once
ROOM = 125 * GIB  # of the GPU for all of them
CONTEXT = 2 * GIB  # that each takes beside what it reserves, at most
PATIENCE = 120.0  # seconds for a group to get ready
Item = TypeVar("Item")


@dataclass
class Notes:
    """What was measured so far, kept in a file, and the time that there is."""

    path: Path
    until: float  # of `time.monotonic`
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.data = json.loads(self.path.read_text())
        for part in ("measurements", "capped", "largest", "troubles"):
            self.data.setdefault(part, {})

    def note(self, part: str, key: str, found: dict[str, Any] | None) -> None:
        """Something was found; what failed is kept apart, so that it is tried again next time."""
        if found is None or "error" in found:
            self.data["troubles"][key] = (found or {}).get("error", "no answer in time")
            print(f"{part}: {key}: {self.data['troubles'][key]}", flush=True)
        else:
            self.data["troubles"].pop(key, None)
            self.data[part][key] = found

    def write(self) -> None:
        write_json(self.path, self.data)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until


def groups(items: Iterable[tuple[Item, int]], most: int = TOGETHER, room: int = ROOM) -> Iterator[list[Item]]:
    """Items that fit beside one another, in their order; each comes with the bytes that it needs.

    >>> list(groups([("a", 60), ("b", 60), ("c", 30)], room=100))
    [['a'], ['b', 'c']]
    """
    group: list[Item] = []
    taken = 0
    for item, need in items:
        if group and (len(group) == most or taken + need > room):
            yield group
            group, taken = [], 0
        group.append(item)
        taken += need
    if group:
        yield group


def time_alone(tell: Tell, hear: Hear, name: str, batch: int) -> None:
    """A child's job: warm up beside the others, wait for its turn, then be timed; it stays until it is told to end."""
    quiet()

    def ready() -> None:
        tell({"ready": True})
        hear()

    tell(timed(BY_NAME[name].script, batch, Gpu(), ready))
    hear()


def fit_under(tell: Tell, hear: Hear, name: str, batch: int, cap: int) -> None:
    """A child's job: does it run under a cap?"""
    quiet()
    device = Gpu()
    device.cap(cap * GIB)
    tell({"fits": fits(BY_NAME[name].script, batch, device)})


def largest_under(tell: Tell, hear: Hear, name: str, cap: int, guess: int) -> None:
    """A child's job: the largest batch under a cap, looked for around a guess; each is tried in a process of its own.

    In one that has run something else, the driver would hand out other addresses, by which PyTorch chooses blocks.
    """
    tried: list[tuple[int, bool]] = []

    def run(batch: int) -> bool:
        attempt = Child(partial(fit_under, name=name, batch=batch, cap=cap))
        found = attempt.hear(time.monotonic() + PATIENCE)
        attempt.end()
        if found is None or "error" in found:
            raise RuntimeError((found or {}).get("error", f"no answer with {batch} in time"))
        tried.append((batch, found["fits"]))
        return tried[-1][1]

    low, high = bracket(run, guess)
    tell({"training": name, "cap": cap, "batch": low, "too_large": high, "tried": tried})


def measure(predictions: dict[str, Any], names: set[str], notes: Notes, used: Callable[[], int | None]) -> None:
    """Memory and times of every training that was predicted."""
    waiting = [
        (key, found["process"] + CONTEXT)
        for key, found in predictions["predictions"].items()
        if found["training"] in names and key not in notes.data["measurements"]
    ]
    for group in groups(waiting):
        if notes.late:
            return
        began = time.monotonic()
        until = min(began + PATIENCE, notes.until + PATIENCE / 4)
        children = {}
        for key in group:
            found = predictions["predictions"][key]
            children[key] = Child(partial(time_alone, name=found["training"], batch=found["batch"]))
        first = {key: child.hear(until) for key, child in children.items()}
        for key, child in children.items():
            if not (first[key] or {}).get("ready"):
                notes.note("measurements", key, first[key] if first[key] and "error" in first[key] else None)
                child.end()
                continue
            child.say("go")
            found = child.hear(time.monotonic() + PATIENCE)
            before = used()
            child.end()
            notes.note("measurements", key, found and {**found, "process": gone(before, used)})
        notes.write()
        print(f"{', '.join(group)}: {time.monotonic() - began:.0f} s", flush=True)


def gone(before: int | None, used: Callable[[], int | None], patience: float = 2.0) -> int | None:
    """Bytes that the device got back when a process ended, which is what the process had; None where nobody says."""
    until = time.monotonic() + patience
    after = used()
    while before is not None and after is not None and after >= before and time.monotonic() < until:
        time.sleep(0.02)
        after = used()
    return None if before is None or after is None or after >= before else before - after


def alone(jobs: Iterable[tuple[str, int, Callable[[Tell, Hear], None]]], part: str, notes: Notes) -> None:
    """Jobs that tell one thing each, several at once."""
    for group in groups((((key, job), need) for key, need, job in jobs)):
        if notes.late:
            return
        began = time.monotonic()
        children = {key: Child(job) for key, job in group}
        for key, child in children.items():
            notes.note(part, key, child.hear(min(began + PATIENCE, notes.until + PATIENCE / 4)))
            child.end()
        notes.write()
        print(f"{part}: {', '.join(children)}: {time.monotonic() - began:.0f} s", flush=True)


def capped_jobs(names: set[str], predictions: dict[str, Any], notes: Notes) -> Iterator[Any]:
    """Those whose allocator reserved more than a cap: the others would not notice it."""
    for key, found in notes.data["measurements"].items():
        told = predictions["predictions"][key]
        for cap in CAPS:
            name = f"{key} {cap}"
            if told["training"] in names and found["reserved"] > cap * GIB and name not in notes.data["capped"]:
                job = partial(fit_under, name=told["training"], batch=told["batch"], cap=cap)
                yield name, cap * GIB + CONTEXT, job


def largest_jobs(names: set[str], predictions: dict[str, Any], notes: Notes) -> Iterator[Any]:
    for key, told in predictions["largest"].items():
        if told["training"] in names and key not in notes.data["largest"]:
            job = partial(largest_under, name=told["training"], cap=told["cap"], guess=told["batch"] or 1)
            yield key, told["cap"] * GIB + CONTEXT, job


def used_by_nvml() -> Callable[[], int | None]:
    """Bytes in use on the device as the driver says; CUDA must not be touched here, since forks could not use it."""
    with suppress(Exception):  # without NVML the process's memory is not known, and nothing else is lost
        import pynvml  # noqa: PLC0415

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(device).used)
    return lambda: None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", type=Path, required=True, metavar="FILE", help="what predict.py wrote")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="what is there already is kept")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings alone")
    parser.add_argument("--seconds", type=float, default=330.0, help="after which nothing new is begun")
    arguments = parser.parse_args()
    predictions = json.loads(arguments.predictions.read_text())
    names = {case.name for case in chosen(arguments.only)}
    notes = Notes(arguments.json, time.monotonic() + arguments.seconds)
    asked = Child(
        lambda tell, hear: tell({"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()})
    )
    about = asked.hear(time.monotonic() + PATIENCE)
    asked.end()
    if about is None or "error" in about:
        raise SystemExit(f"there is no CUDA GPU to measure on: {(about or {}).get('error', 'no answer')}")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    notes.data |= {**about, "versions": versions(), "commit": commit(), "date": date}
    measure(predictions, names, notes, used_by_nvml())
    alone(capped_jobs(names, predictions, notes), "capped", notes)
    alone(largest_jobs(names, predictions, notes), "largest", notes)
    notes.write()
    for key, words in notes.data["troubles"].items():
        print(f"trouble: {key}: {words}")
    if notes.late:
        print("the time was up: the same command measures the rest")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
