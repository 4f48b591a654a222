"""Measure on a GPU what libraries take beside the results of operations, and write the table that simulations use.

    python benchmarks/calibrate_memory.py                 measure everything: about 7 minutes
    python benchmarks/calibrate_memory.py --add RAW       measure what RAW does not have, and add it
    python benchmarks/calibrate_memory.py --fit RAW       make the table from what was measured; needs no GPU

Synthetic operations alone, none of the models that the simulation is tested on. Every measurement is tried by itself
and written as it comes, to `--raw`, so that a run that is cut short leaves what it has.
"""

import argparse
import ast
import gc
import gzip
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch.nn.attention import SDPBackend

from convolution_plans import plan_of
from harness.about import facts
from hotloop.apps.simulate.cards import Card, card, cards
from hotloop.apps.simulate.convolution_workspaces import Case
from hotloop.apps.simulate.library_memory import TABLES, Constants, tables
from hotloop.errors import DeviceUnavailable, HotloopError
from hotloop.records.files import write_whole
from memory_cases import ANY, CASES, GRID, MORE, OTHER_KERNELS, SEQUENCES, STRIDED, UNEQUAL, USUAL, VOLUMES
from memory_measures import (
    PARTS,
    Task,
    attempted,
    attend,
    attend_by_default,
    convolve,
    multiply,
    normalise,
    product_of,
    recur,
    step_foreach,
)

SECONDS = 480.0
WORKERS = 12  # processes: memory does not depend on the load, and to choose a kernel takes the host's time
MARGIN = 0.04


class Notes:
    """What was measured and what failed, on disk as it comes."""

    def __init__(self, path: Path, seconds: float, before: dict[str, Any] | None = None) -> None:
        self.path = path
        self.until = time.monotonic() + seconds
        self.about = dict(before or {})
        self.rows: list[dict[str, Any]] = self.about.pop("rows", [])
        self.failures: list[str] = self.about.pop("failures", [])
        self.known = {row["what"] for row in self.rows}
        self._written = 0.0

    def attempt(self, what: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """One measurement; a failure is noted and stops nothing. None where it failed, is there, or the time is up."""
        if what in self.known or self.late:
            return None
        try:
            row = {"what": what, **call()}
        except Exception as error:  # noqa: BLE001  # of any kind: the others are worth having
            self.failures.append(f"{what}: {type(error).__name__}: {error}"[:300])
            gc.collect()
            torch.cuda.empty_cache()
            return None
        self.add(row)
        return row

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.known.add(row["what"])
        if time.monotonic() - self._written > 10:
            self.write()

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until

    def write(self) -> None:
        text = json.dumps({**self.about, "failures": self.failures})[:-1] + ', "rows": [\n'
        text += ",\n".join(json.dumps(row) for row in self.rows) + "\n]}\n"
        write_whole(self.path, gzip.compress(text.encode(), mtime=0))
        self._written = time.monotonic()

    @property
    def raw(self) -> dict[str, Any]:
        return {**self.about, "rows": self.rows, "failures": self.failures}


def used() -> list[int]:
    """Bytes of this process on every GPU, as the driver says, without CUDA."""
    handles = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount()))
    processes = [{p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)} for h in handles]
    return [int(there.get(os.getpid()) or 0) for there in processes]


def context(notes: Notes) -> dict[str, int]:
    """Bytes outside the allocator, as libraries are used for the first time. To be called before anything else."""
    start = used()
    stages: dict[str, Callable[[], Any]] = {
        "base": lambda: torch.zeros(1, device="cuda") + 1,
        "blas": lambda: [product_of(dtype) for dtype in (torch.float32, torch.bfloat16)],
        "cudnn": lambda: [list(convolve(Task(CASES[2], *how))) for how in product(("tf32", "half"), (False, True))],
        "attention": lambda: attend(SDPBackend.FLASH_ATTENTION, 2, 4, 256, 64, torch.bfloat16),
    }  # fmt: skip
    found: dict[str, int] = {}
    for name, call in stages.items():
        if notes.attempt(f"context {name}", lambda: {"done": call() is not None}) is None:  # noqa: B023
            continue
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        grown = max(now - before for now, before in zip(used(), start, strict=True))  # on whichever GPU it is
        found[name] = max(0, grown - torch.cuda.memory_reserved() - sum(found.values()))
    return found


def convolutions(notes: Notes, tasks: Iterable[Task]) -> None:
    """Every part of every task that is not known yet, in several processes."""
    waiting = [task for task in tasks if any(task.what(part) not in notes.known for part in PARTS)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for rows, failure in pool.map(attempted, waiting, chunksize=4):
            for row in rows:
                if row["what"] not in notes.known:
                    notes.add(row)
            if failure:
                notes.failures.append(failure)
            if notes.late:
                pool.shutdown(cancel_futures=True)
                return


def factors_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The factors of batch norm; of several measurements the largest, so that nothing is left out."""
    found: dict[str, float] = {}
    for row in rows:
        if row["what"].startswith("batch norm") and row["last"]:
            precision = ".half" if row["dtype"].endswith("16") else ""
            for name, part in (("reserve", "reserve"), ("workspace", "beside")):
                key = f"batch_norm.{name}{precision}"
                found[key] = max(found.get(key, 0.0), round(row[part] / row["numel"], 4))
    return found


def plans_of(rows: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """What convolutions took, by part, precision and layout; of two measurements of one, the later."""
    found: dict[str, dict[Case, str]] = {}
    for row in rows:
        if "key" in row:
            part, precision, layout, _, *benchmark = row["key"].split("/")
            case = Case(*ast.literal_eval(row["what"][row["what"].index("(") : row["what"].index(")") + 1]))
            plan = plan_of(part, case, row["x"], row["weight"], row["y"], row["taken"])
            found.setdefault("/".join((part, precision, layout, *benchmark)), {})[case] = str(plan)
    return {key: tuple(plans.values()) for key, plans in sorted(found.items())}


def table_of(raw: dict[str, Any]) -> Constants:
    """What was measured, over what is taken for true where nothing was."""
    chip = card_of(raw)
    before = next(each for each in tables() if each.architecture == "any")
    return replace(
        before,
        architecture=chip.architecture,
        torch=".".join(raw["versions"]["torch"].split(".")[:2]),
        calibrated=True,
        source=f"measured by benchmarks/calibrate_memory.py on {raw['hardware']}",
        context={**before.context, **raw["context"]},
        convolution=plans_of(raw["rows"]),
        factors={**before.factors, **factors_of(raw["rows"])},
        margin=MARGIN,
    )


def write_table(raw: dict[str, Any], folder: Path) -> Path:
    table = table_of(raw)
    path = folder / f"memory-{table.architecture}-{table.torch}.json.gz"
    write_whole(path, gzip.compress(json.dumps(table.to_json(), indent=0).encode(), mtime=0))
    return path


def read(path: Path) -> dict[str, Any]:
    """What was measured, as `Notes` wrote it."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def card_of(raw: dict[str, Any]) -> Card:
    """The card of a measurement; of an unknown one, another with the same capability."""
    try:
        return card(raw["hardware"].split(",")[0])
    except HotloopError:
        return next(each for each in cards() if list(each.capability) == list(raw["capability"]))


def smaller(notes: Notes) -> None:
    """Everything but convolutions, which is quick."""
    half, full = torch.bfloat16, torch.float32
    notes.attempt("cuBLAS", multiply)
    for last, dtype, shape in product((True, False), (half, full), ((32, 64, 56), (64, 256, 14))):
        notes.attempt(f"batch norm {last} {dtype} {shape}", lambda: normalise(last, dtype, *shape))  # noqa: B023
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for backend, shape in product(backends, ((4, 12, 1024, 64), (2, 16, 2048, 128), (16, 8, 256, 64))):
        notes.attempt(f"{backend.name} {shape}", lambda: attend(backend, *shape, half))  # noqa: B023
    notes.attempt("efficient fp32", lambda: attend(SDPBackend.EFFICIENT_ATTENTION, 4, 12, 1024, 64, full))
    for numel, number in ((1_000_000, 50), (100_000, 300)):
        notes.attempt(f"foreach {numel}x{number}", lambda: step_foreach(numel, number))  # noqa: B023


def chosen_by_default(notes: Notes) -> None:
    """What PyTorch chooses by itself: attention, and recurrent networks of several layers."""
    half, full = torch.bfloat16, torch.float32
    attentions = ((8, 12, 512, 64), (4, 16, 1000, 64), (4, 8, 512, 128), (4, 8, 512, 80), (4, 6, 197, 64))
    ways = ("plain", "causal", "mask", "dropout", "grouped")
    for shape, way, dtype in product(attentions, ways, (half, torch.float16, full)):
        run = lambda: attend_by_default(way, *shape, dtype)  # noqa: B023, E731  # called at once
        notes.attempt(f"attention {way} {dtype} {shape}", run)
    for last, shape in product((True, False), ((32, 64, 56), (64, 256, 14))):
        what = f"batch norm {last} {torch.float16} {shape}"
        notes.attempt(what, lambda: normalise(last, torch.float16, *shape))  # noqa: B023
    shapes = ((32, 64, 256, 512), (64, 100, 512, 512), (16, 200, 128, 256), (96, 48, 64, 320), (160, 150, 300, 384))
    cells = product(("lstm", "gru", "rnn"), shapes, (1, 2, 3), (False, True), (0.0, 0.2))
    for cell, shape, layers, both, dropout in cells:
        if layers == 1 and dropout:
            continue
        what = f"recurrent {cell} {shape} {layers} layers {both=} {dropout=}"
        notes.attempt(what, lambda: recur(cell, *shape, layers, both, dropout))  # noqa: B023


def tasks() -> list[Task]:
    """All convolutions, the settings that people use most first."""
    usual = [("tf32", False), ("half", True), ("half", False), ("fp16", False), ("tf32", True), ("fp16", True)]
    found = [Task(case, *way) for way in (*usual, ("fp32", False), ("fp32", True)) for case in CASES]
    # PyTorch keeps the plan of a shape whichever way it was found: so those that are searched for must be new.
    searched = [case._replace(batch=case.batch + 1) for case in CASES[::2]]
    found += [Task(case, *way, benchmark=True) for way in usual for case in searched]
    found += [Task(case, *way) for way in usual for case in MORE]
    rest = (*GRID, *ANY, *USUAL, *VOLUMES, *UNEQUAL, *STRIDED, *OTHER_KERNELS)
    shuffled = random.Random(0).sample(rest, len(rest))  # noqa: S311  # so that one that is cut off has seen all kinds
    found += [Task(case, *way) for case in shuffled for way in usual]
    found += [Task(case, *way) for case in SEQUENCES for way in usual if not way[1]]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TABLES, help="folder of the tables")
    parser.add_argument("--raw", type=Path, default=Path("benchmarks/results/memory-calibration.json.gz"))
    parser.add_argument("--add", type=Path, metavar="RAW", help="measure what this file does not have")
    parser.add_argument("--fit", type=Path, metavar="RAW", help="only make the table from this file")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which nothing new is begun")
    arguments = parser.parse_args()
    if arguments.fit:
        print(write_table(read(arguments.fit), arguments.out))
        return 0
    if not torch.cuda.is_available():
        raise DeviceUnavailable("there is no CUDA GPU here to measure", fix="run this on a machine with one, or --fit")
    pynvml.nvmlInit()
    if arguments.add:
        notes = Notes(arguments.add, arguments.seconds, read(arguments.add))
    else:
        notes = Notes(arguments.raw, arguments.seconds, about())
        notes.about["context"] = context(notes)
    smaller(notes)
    chosen_by_default(notes)
    convolutions(notes, tasks())
    notes.write()
    path = write_table(notes.raw, arguments.out)
    print(f"{len(notes.rows)} measurements, {len(notes.failures)} failures; {path}")
    return 0


def about() -> dict[str, Any]:
    found = facts([torch.device("cuda")]) | {"capability": torch.cuda.get_device_capability(0)}
    return {**found, "date": f"{datetime.now(UTC):%Y-%m-%d}"}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HotloopError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
