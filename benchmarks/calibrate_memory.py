"""Measure on a GPU what libraries take beside the results of operations, and write the table that simulations use.

    python benchmarks/calibrate_memory.py

Synthetic operations alone, none of the models that the simulation is tested on. Every measurement is tried by itself
and written as it comes, to `--raw`; the table is written again after each part, so that a run that is cut short leaves
what it has. It takes less than 4 minutes.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotloop.bench.about import commit, hardware, versions
from hotloop.errors import DeviceUnavailable, HotloopError
from hotloop.files import write_json
from hotloop.simulate.cards import Card, card, cards
from hotloop.simulate.constants import TABLES, Constants, Sample, constants_for, shares_of
from hotloop.simulate.workspaces import blas_workspace
from hotloop.text import size

SECONDS = 220.0
MARGIN = 0.04
aten = torch.ops.aten


class Case(NamedTuple):
    """A convolution."""

    batch: int
    inputs: int
    outputs: int
    pixels: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    dimensions: int = 2

    @property
    def kind(self) -> str:
        if self.groups > 1:
            return "grouped"
        if self.dimensions == 3:
            return "volume"
        return "pointwise" if self.kernel == 1 else "spatial"


CASES = (
    Case(16, 3, 64, 224, 7, 2),
    Case(16, 3, 64, 112),
    Case(32, 64, 64, 56),
    Case(64, 64, 128, 56, 3, 2),
    Case(32, 128, 128, 28),
    Case(64, 256, 256, 14),
    Case(64, 512, 512, 7),
    Case(8, 32, 32, 128),
    Case(4, 96, 48, 128),
    Case(16, 320, 320, 32),
    Case(32, 128, 64, 32, 4, 2),
    Case(128, 16, 32, 32, 5),
    Case(32, 64, 256, 56, 1),
    Case(32, 256, 64, 56, 1),
    Case(32, 512, 1024, 28, 1, 2),
    Case(64, 1024, 2048, 14, 1),
    Case(64, 2048, 512, 7, 1),
    Case(32, 96, 96, 56, 7, 1, 96),
    Case(32, 144, 144, 56, 3, 2, 144),
    Case(32, 128, 128, 28, 3, 1, 32),
    Case(16, 256, 256, 14, 3, 1, 256),
    Case(2, 16, 32, 32, 3, 1, 1, 3),
    Case(4, 32, 32, 16, 3, 1, 1, 3),
    Case(1, 64, 64, 32, 3, 2, 1, 3),
)
PRECISIONS = {"tf32": torch.float32, "half": torch.bfloat16, "fp32": torch.float32}
PARTS = ("forward", "input", "weight")


class Notes:
    """What was measured and what failed, on disk as it comes."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.until = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._written = 0.0

    def attempt(self, what: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """One measurement; a failure is noted and stops nothing. None where it failed or the time is up."""
        if time.monotonic() > self.until:
            return None
        try:
            row = {"what": what, **call()}
        except Exception as error:  # noqa: BLE001  # of any kind: the others are worth having
            self.failures.append(f"{what}: {type(error).__name__}: {error}"[:300])
            gc.collect()
            torch.cuda.empty_cache()
            return None
        self.rows.append(row)
        if time.monotonic() - self._written > 5:
            self.write()
        return row

    def write(self, **more: Any) -> None:
        write_json(self.path, {**more, "rows": self.rows, "failures": self.failures})
        self._written = time.monotonic()


def taken(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """Bytes that a call had beside what it left, bytes that it left, and its result; as they were asked for."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    after = stats["requested_bytes.all.current"]
    return stats["requested_bytes.all.peak"] - after, after - before, result


@contextmanager
def conditions(precision: str, benchmark: bool) -> Iterator[None]:
    """cuDNN's settings, put back afterwards."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32, cudnn.benchmark = precision != "fp32", benchmark
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.benchmark = before


def convolve(case: Case, part: str, precision: str, last: bool, benchmark: bool) -> dict[str, Any]:
    """One part of one convolution; of its first run, in which cuDNN chooses: so it is in a training, too."""
    dtype = PRECISIONS[precision]
    layout = torch.contiguous_format
    if last:
        layout = torch.channels_last if case.dimensions == 2 else torch.channels_last_3d
    shape = (case.pixels,) * case.dimensions
    kernel = (case.kernel,) * case.dimensions
    x = torch.randn(case.batch, case.inputs, *shape, device="cuda", dtype=dtype).to(memory_format=layout)
    w = torch.randn(case.outputs, case.inputs // case.groups, *kernel, device="cuda", dtype=dtype)
    w = w.to(memory_format=layout)
    each = case.dimensions
    more = ([case.stride] * each, [case.kernel // 2] * each, [1] * each, False, [0] * each, case.groups)
    with conditions(precision, benchmark):
        if part == "forward":
            beside, _, y = taken(lambda: aten.convolution(x, w, None, *more))
        else:
            y = aten.convolution(x, w, None, *more)
            gradient, mask = torch.ones_like(y), [part == "input", part == "weight", False]
            beside, _, _ = taken(lambda: aten.convolution_backward(gradient, x, w, None, *more, mask))
    key = f"{part}/{precision}/{'last' if last else 'first'}/{case.kind}{'/benchmark' if benchmark else ''}"
    sizes = (t.numel() * t.element_size() for t in (x, w, y))
    return Sample(key, *sizes, max(0, beside))._asdict()


def convolutions(notes: Notes, benchmark: bool) -> None:
    """Every part of every case, the settings that people use most first."""
    # PyTorch keeps the plan of a shape whichever way it was found: so shapes that are searched for must be new ones.
    cases = [case._replace(batch=case.batch + 1) for case in CASES[::2]] if benchmark else CASES
    for last, precision in product((False, True), PRECISIONS):
        for case, part in product(cases, PARTS):
            what = f"convolution {part} {precision} {'last' if last else 'first'} {tuple(case)}"
            run = lambda: convolve(case, part, precision, last, benchmark)  # noqa: B023, E731  # called at once
            notes.attempt(what, run)


def normalise(last: bool, dtype: torch.dtype, batch: int, channels: int, pixels: int) -> dict[str, Any]:
    x = torch.randn(batch, channels, pixels, pixels, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    one, zero = torch.ones(channels, device="cuda"), torch.zeros(channels, device="cuda")
    beside, _, found = taken(lambda: aten.cudnn_batch_norm(x, one, zero, zero.clone(), one.clone(), True, 0.1, 1e-5))
    reserve = found[3].numel() * found[3].element_size()
    return {"last": last, "dtype": str(dtype), "numel": x.numel(), "reserve": reserve, "beside": beside}


def recur(cell: str, batch: int, length: int, width: int, layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """The reserve that a recurrent network keeps, and what its two passes have beside."""
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
    net = kinds[cell](width, width, layers).to("cuda", dtype)
    x = torch.randn(length, batch, width, device="cuda", dtype=dtype, requires_grad=True)
    net(x)  # flattens its weights
    forward, left, (y, state) = taken(lambda: net(x))
    states = state if isinstance(state, tuple) else (state,)
    seen = sum(t.numel() * t.element_size() for t in (y, *states))
    ones = torch.ones_like(y)
    inputs = (x, *net.parameters())
    backward, _, _ = taken(lambda: torch.autograd.grad(y, inputs, ones, retain_graph=True))
    unit = batch * length * width * layers * y.element_size()
    return {
        "cell": cell,
        "reserve": max(0, left - seen) / unit,
        "workspace": forward / unit,
        "backward": backward / unit,
    }


def attend(backend: SDPBackend, batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the backward pass of attention has beside its gradients, in copies of the queries in fp32."""
    q, k, v = (
        torch.randn(batch, heads, length, width, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    )
    with sdpa_kernel(backend):
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        ones = torch.ones_like(y)
        beside, _, _ = taken(lambda: torch.autograd.grad(y, (q, k, v), ones, retain_graph=True))
    return {"backend": backend.name, "copies": max(0, beside - 4 * batch * heads * length) / (4 * q.numel())}


def multiply() -> dict[str, Any]:
    """The workspace that cuBLAS keeps; measured in a thread's first product."""
    a = torch.randn(512, 512, device="cuda")
    torch.cuda.synchronize()
    beside, left, c = taken(lambda: a @ a)
    return {"beside": beside, "kept": left - c.numel() * c.element_size()}


def step_foreach(numel: int, count: int) -> dict[str, Any]:
    """What Adam's foreach step has at most, in copies of its parameters: a check of what the engine sees."""
    weights = [torch.randn(numel, device="cuda", requires_grad=True) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam(weights, foreach=True)
    optimizer.step()
    beside, _, _ = taken(optimizer.step)
    return {"copies": beside / (4 * numel * count)}


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
        "blas": lambda: [_product(dtype) for dtype in (torch.float32, torch.bfloat16)],
        "cudnn": lambda: [convolve(CASES[2], part, p, last, False) for part in PARTS for p in ("tf32", "half")
                          for last in (False, True)],
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


def _product(dtype: torch.dtype) -> Tensor:
    a = torch.randn(256, 256, device="cuda", dtype=dtype, requires_grad=True)
    (a @ a).sum().backward()
    return a


def factors_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The factors of everything but convolutions: of several measurements the largest, so that nothing is left out."""
    found: dict[str, float] = {}
    for row in rows:
        if "cell" in row:
            for part in ("reserve", "workspace", "backward"):
                key = f"{row['cell']}.{part}"
                found[key] = max(found.get(key, 0.0), round(row[part], 3))
        elif "reserve" in row and row["last"]:
            share = row["reserve"] / row["numel"]
            found["batch_norm.reserve"] = max(found.get("batch_norm.reserve", 0.0), round(share, 5))
        elif row.get("backend") in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
            key = f"attention.{row['backend'].split('_')[0].lower()}"
            found[key] = max(found.get(key, 0.0), round(row["copies"], 3))
    return found


def samples_of(rows: list[dict[str, Any]]) -> list[Sample]:
    return [Sample(*(row[name] for name in Sample._fields)) for row in rows if "key" in row]


def table_of(before: Constants, notes: Notes, outside: dict[str, int], architecture: str) -> Constants:
    """What was measured, over what was taken for true before."""
    version = ".".join(torch.__version__.split(".")[:2])
    return replace(
        before,
        architecture=architecture,
        torch=version,
        calibrated=True,
        source=f"measured by benchmarks/calibrate_memory.py on {hardware([torch.device('cuda')])},"
        f" {datetime.now(UTC):%Y-%m-%d}",
        context={**before.context, **outside},
        convolution={**before.convolution, **shares_of(samples_of(notes.rows))},
        factors={**before.factors, **factors_of(notes.rows)},
        margin=MARGIN,
    )


def here() -> Card:
    """The card of this machine; of an unknown one, another with the same capability."""
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    try:
        return card(name)
    except HotloopError:
        return next(each for each in cards() if each.capability == capability)


def smaller(notes: Notes) -> None:
    """Everything but convolutions, which is quick."""
    half, full = torch.bfloat16, torch.float32
    notes.attempt("cuBLAS", multiply)
    for last, dtype, shape in product((True, False), (half, full), ((32, 64, 56), (64, 256, 14))):
        notes.attempt(f"batch norm {last} {dtype} {shape}", lambda: normalise(last, dtype, *shape))  # noqa: B023
    shapes = ((16, 64, 256, 1), (32, 128, 512, 2), (64, 32, 1024, 2))
    for cell, dtype, shape in product(("lstm", "gru", "rnn"), (full, half), shapes):
        notes.attempt(f"{cell} {dtype} {shape}", lambda: recur(cell, *shape, dtype))  # noqa: B023
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for backend, shape in product(backends, ((4, 12, 1024, 64), (2, 16, 2048, 128), (16, 8, 256, 64))):
        notes.attempt(f"{backend.name} {shape}", lambda: attend(backend, *shape, half))  # noqa: B023
    notes.attempt("efficient fp32", lambda: attend(SDPBackend.EFFICIENT_ATTENTION, 4, 12, 1024, 64, full))
    for numel, number in ((1_000_000, 50), (100_000, 300)):
        notes.attempt(f"foreach {numel}x{number}", lambda: step_foreach(numel, number))  # noqa: B023


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TABLES, help="folder of the tables")
    parser.add_argument("--raw", type=Path, default=Path("benchmarks/results/memory-calibration.json"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which nothing new is begun")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise DeviceUnavailable("there is no CUDA GPU here to measure", fix="run this on a machine with one")
    pynvml.nvmlInit()
    notes = Notes(arguments.raw, arguments.seconds)
    outside = context(notes)
    chip = here()
    before = constants_for(chip, torch.__version__)
    path = arguments.out / f"memory-{chip.architecture}-{'.'.join(torch.__version__.split('.')[:2])}.json"
    for part in (smaller, lambda notes: convolutions(notes, False), lambda notes: convolutions(notes, True)):
        part(notes)
        write_json(path, table_of(before, notes, outside, chip.architecture).to_json())
    about = {"hardware": hardware([torch.device("cuda")]), "versions": versions(), "commit": commit()}
    notes.write(**about, context=outside, expected_blas=blas_workspace(chip))
    print(
        f"{len(notes.rows)} measurements, {len(notes.failures)} failures; context {size(sum(outside.values()))}; {path}"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HotloopError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
