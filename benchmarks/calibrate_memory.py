"""Measure on a GPU what libraries take beside the results of operations, and write the table that simulations use.

    python benchmarks/calibrate_memory.py                 measure everything: less than 4 minutes
    python benchmarks/calibrate_memory.py --add RAW       measure what RAW does not have, and add it: a minute
    python benchmarks/calibrate_memory.py --fit RAW       make the table from what was measured; needs no GPU

Synthetic operations alone, none of the models that the simulation is tested on. Every measurement is tried by itself
and written as it comes, to `--raw`, so that a run that is cut short leaves what it has.
"""

import argparse
import ast
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pynvml
import torch
from memory_cases import CASES, MORE
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotloop.bench.about import commit, hardware, versions
from hotloop.errors import DeviceUnavailable, HotloopError
from hotloop.files import write_json
from hotloop.simulate.cards import Card, card, cards
from hotloop.simulate.constants import TABLES, Constants, tables
from hotloop.simulate.convolutions import Case, plan_of

SECONDS, MORE_SECONDS = 220.0, 60.0
MARGIN = 0.04
aten = torch.ops.aten


DTYPES = {"tf32": torch.float32, "half": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
PRECISIONS = ("tf32", "half", "fp32")
PARTS = ("forward", "input", "weight")


class Notes:
    """What was measured and what failed, on disk as it comes."""

    def __init__(self, path: Path, seconds: float, before: dict[str, Any] | None = None) -> None:
        self.path = path
        self.until = time.monotonic() + seconds
        self.about = dict(before or {})
        self.rows: list[dict[str, Any]] = self.about.pop("rows", [])
        self.failures: list[str] = self.about.pop("failures", [])
        self._known = {row["what"] for row in self.rows}
        self._written = 0.0

    def attempt(self, what: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """One measurement; a failure is noted and stops nothing. None where it failed, is there, or the time is up."""
        if what in self._known or time.monotonic() > self.until:
            return None
        try:
            row = {"what": what, **call()}
        except Exception as error:  # noqa: BLE001  # of any kind: the others are worth having
            self.failures.append(f"{what}: {type(error).__name__}: {error}"[:300])
            gc.collect()
            torch.cuda.empty_cache()
            return None
        self.rows.append(row)
        self._known.add(what)
        if time.monotonic() - self._written > 5:
            self.write()
        return row

    def write(self) -> None:
        write_json(self.path, self.raw)
        self._written = time.monotonic()

    @property
    def raw(self) -> dict[str, Any]:
        return {**self.about, "rows": self.rows, "failures": self.failures}


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
    dtype = DTYPES[precision]
    layout = torch.contiguous_format
    if last:
        layout = torch.channels_last if case.dimensions == 2 else torch.channels_last_3d
    shape = (int(case.pixels),) * case.dimensions
    kernel = (int(case.kernel),) * case.dimensions
    x = torch.randn(case.batch, case.inputs, *shape, device="cuda", dtype=dtype).to(memory_format=layout)
    w = torch.randn(case.outputs, case.inputs // case.groups, *kernel, device="cuda", dtype=dtype)
    w = w.to(memory_format=layout)
    each = case.dimensions
    more = (
        [case.stride] * each,
        [int(case.kernel) // 2 if case.kernel != case.stride else 0] * each,
        [1] * each,
        False,
        [0] * each,
        case.groups,
    )
    with conditions(precision, benchmark):
        if part == "forward":
            beside, _, y = taken(lambda: aten.convolution(x, w, None, *more))
        else:
            y = aten.convolution(x, w, None, *more)
            gradient, mask = torch.ones_like(y), [part == "input", part == "weight", False]
            beside, _, _ = taken(lambda: aten.convolution_backward(gradient, x, w, None, *more, mask))
    key = f"{part}/{precision}/{'last' if last else 'first'}/{case.kind}{'/benchmark' if benchmark else ''}"
    sizes = {name: t.numel() * t.element_size() for name, t in (("x", x), ("weight", w), ("y", y))}
    return {"key": key, **sizes, "taken": max(0, beside)}


def convolutions(notes: Notes, cases: Iterable[Case], precisions: Iterable[str], benchmark: bool = False) -> None:
    """Every part of every case, the settings that people use most first."""
    for precision, last in product(precisions, (False, True)):
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


def attend_by_default(way: str, batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """What attention keeps and takes when PyTorch chooses the kernel, in the layout that a projection leaves."""
    few = heads // 2 if way == "grouped" else heads
    q, k, v = (
        torch.randn(batch, length, number, width, device="cuda", dtype=dtype, requires_grad=True)
        for number in (heads, few, few)
    )
    mask = torch.ones(batch, 1, length, length, device="cuda", dtype=torch.bool) if way == "mask" else None
    ways = {"is_causal": way == "causal", "dropout_p": 0.1 if way == "dropout" else 0.0, "enable_gqa": way == "grouped"}
    run = lambda: nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask, **ways)  # noqa: E731
    forward, left, y = taken(run)
    node = y.grad_fn.name() if y.grad_fn is not None else ""
    ones = torch.ones_like(y)
    backward, _, _ = taken(lambda: torch.autograd.grad(y, (q, k, v), ones))
    kept = left - y.numel() * y.element_size()
    return {"way": way, "node": node, "forward": forward, "kept": kept, "backward": backward}


def recur_again(cell: str, batch: int, length: int, inputs: int, width: int, layers: int, both: bool) -> dict[str, Any]:
    """Bytes of a recurrent network, with an input of another width, both ways, with dropout; graphs are not kept."""
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU}
    dropout = 0.2 if both and layers > 1 else 0.0
    net = kinds[cell](inputs, width, layers, bidirectional=both, dropout=dropout).cuda()
    x = torch.randn(length, batch, inputs, device="cuda", requires_grad=True)
    net(x)
    forward, left, (y, state) = taken(lambda: net(x))
    ones = torch.ones_like(y)
    backward, given, _ = taken(lambda: torch.autograd.grad(y, (x, *net.parameters()), ones))
    states = state if isinstance(state, tuple) else (state,)
    seen = sum(t.numel() * t.element_size() for t in (y, *states))
    return {"kept": left - seen, "forward": forward, "backward": backward, "given": given}


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
    """What convolutions took, by part, precision and layout."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if "key" in row:
            part, precision, layout, _, *benchmark = row["key"].split("/")
            case = Case(*ast.literal_eval(row["what"][row["what"].index("(") :]))
            plan = plan_of(part, case, row["x"], row["weight"], row["y"], row["taken"])
            found.setdefault("/".join((part, precision, layout, *benchmark)), []).append(str(plan))
    return {key: tuple(plans) for key, plans in sorted(found.items())}


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
    path = folder / f"memory-{table.architecture}-{table.torch}.json"
    write_json(path, table.to_json())
    return path


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
    shapes = ((16, 64, 256, 1), (32, 128, 512, 2), (64, 32, 1024, 2))
    for cell, dtype, shape in product(("lstm", "gru", "rnn"), (full, half), shapes):
        notes.attempt(f"{cell} {dtype} {shape}", lambda: recur(cell, *shape, dtype))  # noqa: B023
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for backend, shape in product(backends, ((4, 12, 1024, 64), (2, 16, 2048, 128), (16, 8, 256, 64))):
        notes.attempt(f"{backend.name} {shape}", lambda: attend(backend, *shape, half))  # noqa: B023
    notes.attempt("efficient fp32", lambda: attend(SDPBackend.EFFICIENT_ATTENTION, 4, 12, 1024, 64, full))
    for numel, number in ((1_000_000, 50), (100_000, 300)):
        notes.attempt(f"foreach {numel}x{number}", lambda: step_foreach(numel, number))  # noqa: B023


def more(notes: Notes) -> None:
    """What else is worth knowing: what PyTorch chooses by itself, and convolutions of many more shapes."""
    half, full = torch.bfloat16, torch.float32
    attentions = ((8, 12, 512, 64), (4, 16, 1000, 64), (4, 8, 512, 128), (4, 8, 512, 80), (4, 6, 197, 64))
    ways = ("plain", "causal", "mask", "dropout", "grouped")
    for shape, way, dtype in product(attentions, ways, (half, torch.float16, full)):
        run = lambda: attend_by_default(way, *shape, dtype)  # noqa: B023, E731  # called at once
        notes.attempt(f"attention {way} {dtype} {shape}", run)
    for last, shape in product((True, False), ((32, 64, 56), (64, 256, 14))):
        what = f"batch norm {last} {torch.float16} {shape}"
        notes.attempt(what, lambda: normalise(last, torch.float16, *shape))  # noqa: B023
    cells = product(("lstm", "gru"), ((32, 64, 256, 512), (64, 100, 512, 512), (16, 200, 128, 256)), (1, 2, 3), (0, 1))
    for cell, shape, layers, ways_ in cells:
        what = f"recurrent {cell} {shape} {layers} layers {'both ways, dropout' if ways_ else ''}"
        notes.attempt(what, lambda: recur_again(cell, *shape, layers, bool(ways_)))  # noqa: B023
    outside = lambda: {"outside": max(used()) - torch.cuda.memory_reserved()}  # noqa: E731
    notes.attempt("context with kernels of many kinds", outside)
    convolutions(notes, MORE, ("tf32", "half"))
    notes.attempt("context with convolutions", outside)
    convolutions(notes, MORE, ("fp16",))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TABLES, help="folder of the tables")
    parser.add_argument("--raw", type=Path, default=Path("benchmarks/results/memory-calibration.json"))
    parser.add_argument("--add", type=Path, metavar="RAW", help="measure what this file does not have")
    parser.add_argument("--fit", type=Path, metavar="RAW", help="only make the table from this file")
    parser.add_argument("--seconds", type=float, help="after which nothing new is begun")
    arguments = parser.parse_args()
    if arguments.fit:
        print(write_table(json.loads(arguments.fit.read_text(encoding="utf-8")), arguments.out))
        return 0
    if not torch.cuda.is_available():
        raise DeviceUnavailable("there is no CUDA GPU here to measure", fix="run this on a machine with one, or --fit")
    pynvml.nvmlInit()
    if arguments.add:
        before = json.loads(arguments.add.read_text(encoding="utf-8"))
        notes = Notes(arguments.add, arguments.seconds or MORE_SECONDS, before)
        more(notes)
    else:
        notes = Notes(arguments.raw, arguments.seconds or SECONDS, about())
        notes.about["context"] = context(notes)
        smaller(notes)
        convolutions(notes, CASES, PRECISIONS)
        # PyTorch keeps the plan of a shape whichever way it was found: so those that are searched for must be new.
        convolutions(notes, [case._replace(batch=case.batch + 1) for case in CASES[::2]], PRECISIONS, benchmark=True)
    notes.write()
    path = write_table(notes.raw, arguments.out)
    print(f"{len(notes.rows)} measurements, {len(notes.failures)} failures; {path}")
    return 0


def about() -> dict[str, Any]:
    capability = torch.cuda.get_device_capability(0)
    found = {"hardware": hardware([torch.device("cuda")]), "capability": capability, "versions": versions()}
    return {**found, "commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HotloopError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
