"""Fit the table of times that `hotloop simulate` uses for an architecture, on a real card: about 5 minutes.

python benchmarks/calibrate_gpu.py --raw benchmarks/results/calibration_h200.json.gz
python benchmarks/calibrate_gpu.py --raw benchmarks/results/calibration_h200.json.gz --add  # what is new

Synthetic operations of every family over sizes and precisions; no model that predictions are tested on. Kernels are
timed by CUDA events behind a pause of the device, so that the host's pace does not matter. `--device cpu --quick`
only shows that it runs: its table is worth nothing and is written nowhere but to `--table`.
"""

import argparse
import gzip
import json
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibration_cases import Call, Case, cases
from calibration_fit import Fitted, Sample, fit_cache, fit_nearby
from calibration_observe import observe
from host_cost import measure
from hotloop.apps.simulate import cost
from hotloop.apps.simulate.cards import Card, card
from hotloop.apps.simulate.products import Product
from hotloop.apps.simulate.table import ArchitectureTable, HostCost, Link, default_table
from hotloop.apps.simulate.work import Tf32, WorkPart, parts_of, switches
from hotloop.device.clock import synchronize
from hotloop.records.files import write_json, write_whole

TABLES = Path(__file__).resolve().parents[1] / "src" / "hotloop" / "apps" / "simulate" / "tables"
META = torch.device("meta")
SHORT = 1e-5  # seconds, below which it hardly matters how well an operation is foretold
CYCLES = 2e9  # of the device's clock in a second, at least as many as any has


def seconds_of(call: Call, device: torch.device, *, repeats: int = 3, target: float = 3e-3) -> float:
    """The median seconds of a call on the device, without the host's part in it."""
    for _ in range(3):
        call()
    once = _wall(call, 1, device)
    calls = min(max(round(target / max(once, 1e-6)), 2), 100)
    if device.type != "cuda":
        return min(_wall(call, calls, device) / calls for _ in range(2))
    pause = min(calls * once + 1e-3, 0.1)  # by then the host has queued them all
    return statistics.median(_on_device(call, calls, pause) / calls for _ in range(repeats))


def _on_device(call: Call, calls: int, pause: float) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(pause * CYCLES))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _wall(call: Call, calls: int, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return time.perf_counter() - begin


def measure_all(
    chosen: list[Case], on: Card, device: torch.device, until: float
) -> tuple[list[tuple[Case, Sample]], list[str]]:
    """A sample of every case that is mostly one part of one family, until the time is up; and what went wrong."""
    found, troubles = [], []
    for number, case in enumerate(chosen):
        if time.monotonic() > until:
            troubles.append(f"time was up after {number} of {len(chosen)} cases")
            break
        try:
            sample = _sample(case, on, device)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # out of memory, no such kernel
            troubles.append(
                f"{case.label}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            )
            continue
        if sample is None:
            troubles.append(f"{case.label}: no part is most of it, so nothing can be learnt of any")
        else:
            found.append((case, sample))
        if number % 50 == 0:
            print(f"{number} of {len(chosen)}: {case.label}", flush=True)
    return found, troubles


def _sample(case: Case, on: Card, device: torch.device) -> Sample | None:
    allowed = _allowed(case)
    torch.set_float32_matmul_precision("high" if allowed.products else "highest")
    torch.backends.cudnn.allow_tf32 = allowed.cudnn
    with torch.set_grad_enabled("backward=True" in case.label):
        call = case.make(device)
        call()  # the first call may do more
        parts = [part for operation in observe(call) for part in parts_of(operation, switches())]
        if not parts:
            return None
        taken = seconds_of(call, device)
        # What cannot be measured apart, such as a copy for a second backward pass, is taken off as it is thought to be.
        thought = {number: cost.seconds_of(part, on, default_table()) for number, part in enumerate(parts)}
        main = max(thought, key=thought.__getitem__)
        others = sum(thought.values()) - thought[main]
        return Sample(parts[main], taken - others) if others <= 0.3 * taken else None


def measure_link(on: Card, device: torch.device, *, quick: bool) -> Link:
    """Copies from and to the host, pinned and pageable, as shares of the link's speed."""
    if device.type != "cuda":
        return Link()
    shares: dict[bool, list[float]] = {True: [], False: []}
    tiny = torch.zeros(1).pin_memory()
    latency = _wall(partial(_copy_to, tiny, device), 50, device) / 50
    for pinned in (True, False):
        for size in (2**24, 2**26) if quick else (2**22, 2**24, 2**26, 2**28):
            here = torch.zeros(size // 4)
            here = here.pin_memory() if pinned else here
            there = torch.zeros(size // 4, device=device)
            for call in (partial(there.copy_, here, non_blocking=True), partial(here.copy_, there, non_blocking=True)):
                _wall(call, 2, device)
                taken = statistics.median(_wall(call, 3, device) / 3 for _ in range(3))
                shares[pinned].append(size / max(taken - latency, 1e-9) / on.pcie)
    every = [*shares[True], *shares[False]]
    return Link(statistics.median(shares[True]), statistics.median(shares[False]), latency, min(0.3, _spread(every)))


def _spread(shares: list[float]) -> float:
    return statistics.stdev(shares) / statistics.mean(shares) / 2


def _copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)


def key_of(sample: Sample) -> list[str]:
    """The curves that a sample counts for: its own, and those of its family that others fall back to."""
    part = sample.part
    tail = f"/{part.precision}" + (f"/{part.layout}" if part.layout else "")
    own = [f"{part.family}:{part.variant}{tail}"] if part.variant else []
    return [*own, f"{part.family}{tail}", part.family]


def build(
    samples: list[Sample], on: Card, *, link: Link, host: HostCost, floor: float, least: int = 6
) -> ArchitectureTable:
    """The table that the samples make; a curve with too few of them is left to the default."""
    memory = [sample for sample in samples if sample.part.family in ("pointwise", "copy")]
    cache = fit_cache(memory, on, floor=floor)
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in [*samples, *_kin(samples)]:
        for key in key_of(sample):
            groups[key].append(sample)
    curves, nearby = {}, {}
    fits: dict[tuple[Sample, ...], Fitted] = {}  # where a family has but one variant, both have one curve
    for key, group in sorted(groups.items()):
        if len(group) >= least:
            fitted = fits.get(tuple(group)) or fit_nearby(group, on, floor=floor, cache=cache)
            curve, found, left = fits[tuple(group)] = fitted
            curves[key] = curve
            if found is not None and "/" in key:
                nearby[key] = found
            print(f"{key}: {curve.samples} samples, {_told(group, left)}, spread {curve.spread:.1%}", flush=True)
    date = datetime.now(UTC).date().isoformat()
    return ArchitectureTable(
        on.architecture, on.key, torch.__version__, date, floor, cache, 0.05, curves, nearby, link, host
    )


def _kin(samples: list[Sample]) -> Iterator[Sample]:
    """What was measured in bf16 and not in fp16, and the other way round: their kernels are the same."""
    seen = {sample.part for sample in samples}
    for sample in samples:
        other = {"bf16": "fp16", "fp16": "bf16"}.get(sample.part.precision)
        if sample.part.flops and other is not None:
            twin = replace(sample.part, precision=other)
            if twin not in seen:
                yield replace(sample, part=twin)


def _told(group: list[Sample], left: list[float]) -> str:
    """How far each sample that is not short is missed when it is foretold from the others."""
    errors = [abs(math.expm1(-off)) for off, sample in zip(left, group, strict=True) if sample.seconds > SHORT]
    if len(errors) < 2:
        return "all of them short"
    return f"missed by {statistics.median(errors):.0%}, nine of ten by {statistics.quantiles(errors, n=10)[-1]:.0%}"


def main() -> None:
    arguments = _arguments()
    if arguments.fit:
        write_table(json.loads(gzip.decompress(arguments.fit.read_bytes())), arguments.table)
        return
    device = torch.device(arguments.device)
    on = card(arguments.card or (torch.cuda.get_device_name() if device.type == "cuda" else "t4"))
    until = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)  # it only shows that it runs, and others may need the cores
    tiny = torch.zeros(1, device=device)
    floor = seconds_of(partial(tiny.add_, 1.0), device) * 0.9  # nothing is quicker, and this is still measured
    host, link = measure(device), measure_link(on, device, quick=arguments.quick)
    print(f"{on.name}: a kernel every {floor * 1e6:.2f} µs, {link}, {host}", flush=True)
    before = json.loads(gzip.decompress(arguments.raw.read_bytes())) if arguments.add else {"samples": []}
    known = {row["label"] for row in before["samples"]}
    chosen = [case for case in cases(device, quick=arguments.quick) if case.label not in known]
    if arguments.only:
        chosen = [case for case in chosen if case.label.startswith(tuple(arguments.only))]
    found, troubles = measure_all(chosen, on, device, until)
    for trouble in troubles:
        print(f"left out: {trouble}")
    about = {"card": on.key, "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat()}
    rows = [{"label": case.label, "seconds": sample.seconds, "part": asdict(sample.part)} for case, sample in found]
    whole = {"floor": floor, "link": link.to_json(), "host": host.to_json(), "samples": rows, "troubles": troubles}
    raw = {**about, **whole}
    if arguments.add:  # the rest of it stays as it was measured at first
        raw = {**before, "samples": [*before["samples"], *rows], "troubles": [*before["troubles"], *troubles]}
    if arguments.raw:
        write_whole(arguments.raw, gzip.compress(json.dumps(raw).encode(), mtime=0))
    write_table(raw, arguments.table)


def write_table(raw: dict[str, Any], path: Path | None) -> None:
    """Fit what was measured, and write the table."""
    on = card(raw["card"])
    known = {case.label: case for case in cases(META, quick=False)}
    samples = [Sample(part_anew(row, known.get(row["label"]), on), row["seconds"]) for row in raw["samples"]]
    link, host = Link.from_json(raw["link"]), HostCost.from_json(raw["host"])
    table = replace(build(samples, on, link=link, host=host, floor=raw["floor"]), torch=raw["torch"], date=raw["date"])
    path = path or TABLES / f"time-{on.architecture}.json"
    write_json(path, table.to_json())
    print(f"wrote {path}")


def part_anew(row: dict[str, Any], case: Case | None, on: Card) -> WorkPart:
    """The part of a sample as it is seen today, so that more can be asked of what was measured long ago.

    Recurrent nets are made of other operations on meta tensors than on a card: what is kept of theirs is their label's.
    """
    measured = _part(row["part"])
    if measured.family.startswith("rnn") and not measured.traits:
        return replace(measured, traits=tuple(int(size) for size in re.findall(r"\d+", row["label"])[-3:]))
    if case is None or measured.family.startswith("rnn"):
        return measured
    with torch.set_grad_enabled("backward=True" in case.label):
        parts = [part for operation in observe(case.make(META)) for part in parts_of(operation, _allowed(case))]
    main = max(parts, key=lambda part: cost.seconds_of(part, on, default_table()))
    return main if (main.family, main.precision) == (measured.family, measured.precision) else measured


def _allowed(case: Case) -> Tf32:
    """Where a case is measured with TF32: in convolutions where it says so, in all else that cuDNN does always."""
    return Tf32(case.tf32, case.tf32 or not case.label.startswith("conv"))


def _part(data: dict[str, Any]) -> WorkPart:
    product = data["product"]
    traits = tuple(data.get("traits", ()))
    return WorkPart(**{**data, "product": None if product is None else Product(**product), "traits": traits})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--card", help="as `hotloop simulate --gpu` calls it, where its own name is not known")
    parser.add_argument("--seconds", type=float, default=240.0, help="for measuring; fitting takes a little more")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where the table goes, if not into the package")
    parser.add_argument("--raw", type=Path, metavar="FILE", help="all measurements, as gzipped JSON")
    parser.add_argument("--add", action="store_true", help="measure what is not yet in `--raw`, and add it there")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="how the labels of cases begin: conv, gemm, layer")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="measure nothing: fit what `--raw` wrote once more")
    parser.add_argument("--quick", action="store_true", help="a few cases only, to see that it runs")
    arguments = parser.parse_args()
    if arguments.add and arguments.raw is None:
        parser.error("say with --raw what to add to")
    if arguments.device == "cpu" and arguments.table is None:
        parser.error("a CPU is no card: say with --table where its worthless table goes")
    return arguments


if __name__ == "__main__":
    main()
