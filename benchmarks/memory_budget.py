"""What a budget of memory costs: budget → measured peak and slowdown, on a GPT of 124 million parameters in bf16.

    python benchmarks/memory_budget.py --json benchmarks/results/memory_budget.json

For each share of the plain peak the blocks to compute again are chosen as `Plan(memory_budget=…)` has it. Then the peak
of each choice is measured once more, in an emptied allocator, and the steps of all choices are timed in turns, so that
whatever the machine does meanwhile hits them alike: the slowdown is the median over the rounds, with their spread.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hotloop
from harness.about import commit, hardware, versions
from harness.models import GPT, GPTSize
from hotloop.device.clock import synchronize
from hotloop.files.whole import write_json
from hotloop.memory.oom import clear
from hotloop.plan import Plan
from hotloop.printing.text import duration, size
from hotloop.step.trained_objectives import objectives_of
from hotloop.training.budgeting import Budgeting, budgeted
from hotloop.tune.rehearsal import Rehearsal, confirm, rehearsing
from hotloop.tune.subject import Subject

SHARES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
TINY = GPTSize(layers=4, heads=4, width=32, context=64, vocabulary=128)
ENDLESS = 2**60  # bytes


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of the next token."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def workload(quick: bool, device: torch.device) -> tuple[Subject, Any]:
    """What is trained, and a batch on the device."""
    torch.manual_seed(0)
    shape, items = (TINY, 8) if quick else (GPTSize(), 16)
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    on_gpu = device.type == "cuda"
    plan = Plan(str(device), precision="bf16" if on_gpu else "fp32", fused=on_gpu, stream="direct")
    tokens = torch.randint(0, shape.vocabulary, (items, shape.context + 1), device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Subject(model, [model], objectives_of(optimizer, objective), True, plan, True, str(device)), batch


def peak_of(rehearsal: Rehearsal, plan: Plan, batch: Any) -> int | None:
    """The peak of steps that begin in an emptied allocator."""
    clear(rehearsal.subject.device)
    with rehearsal.step(plan) as step:
        return rehearsal.peak_of(lambda: confirm(step, batch))


def step_seconds(rehearsal: Rehearsal, plan: Plan, batch: Any, steps: int) -> float:
    """Seconds of a step, warmed up."""
    device = rehearsal.subject.device
    with rehearsal.step(plan) as step:
        confirm(step, batch)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            step(batch)
        synchronize(device)
        return (time.perf_counter() - start) / steps


def race(subject: Subject, plans: Sequence[Plan], batch: Any, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Peak, seconds of a step, and slowdown beside the first plan, of each plan."""
    with rehearsing(subject) as rehearsal:
        peaks = [peak_of(rehearsal, plan, batch) for plan in plans]
        times = [[step_seconds(rehearsal, plan, batch, steps) for plan in plans] for _ in range(rounds)]
    figures = []
    for number, peak in enumerate(peaks):
        slower = sorted(each[number] / each[0] for each in times)
        figures.append(
            {
                "peak": peak,
                "step": statistics.median(each[number] for each in times),
                "slowdown": statistics.median(slower),
                "slowdown_low": slower[0],
                "slowdown_high": slower[-1],
            }
        )
    return figures


def rows_of(
    found: Sequence[Budgeting], shares: Sequence[float], figures: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    plain, *kept = figures
    rows = [{"share": None, "budget": None, "recompute": [], "missing": 0, **plain}]
    for share, record, figure in zip(shares, found, kept, strict=True):
        recompute = list(record.recompute)
        rows.append(
            {"share": share, "budget": record.budget, "recompute": recompute, "missing": record.missing} | figure
        )
    return rows


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for column in ("budget", "of the plain peak", "measured peak", "of the budget", "recomputed", "step", "slowdown"):
        table.add_column(column, justify="right")
    for row in rows:
        spread = f"{row['slowdown']:.3f} ({row['slowdown_low']:.3f} to {row['slowdown_high']:.3f})"
        table.add_row(
            "none" if row["budget"] is None else size(row["budget"]),
            "" if row["share"] is None else f"{row['share']:.0%}",
            size(row["peak"]),
            "" if row["budget"] is None else f"{row['peak'] / row['budget']:.1%}",
            str(len(row["recompute"])) + (f", {size(row['missing'])} missing" if row["missing"] != 0 else ""),
            duration(row["step"]),
            spread,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="in which the steps of all choices are timed")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="budgets, of the plain peak")
    parser.add_argument("--quick", action="store_true", help="a tiny GPT on the CPU, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.quick else hotloop.pick().device
    began = time.perf_counter()
    subject, batch = workload(arguments.quick, device)
    shares = (0.9, 0.6) if arguments.quick else arguments.shares
    _, plain = budgeted(subject, replace(subject.plan, memory_budget=ENDLESS), batch)
    assert plain.peak_before is not None
    found = [
        budgeted(subject, replace(subject.plan, memory_budget=int(share * plain.peak_before)), batch)
        for share in shares
    ]
    plans = [subject.plan, *(plan for plan, _ in found)]
    rounds, steps = (1, 2) if arguments.quick else (arguments.rounds, 8)
    rows = rows_of([record for _, record in found], shares, race(subject, plans, batch, rounds, steps))
    seconds = time.perf_counter() - began
    title = f"a step of GPT on {tuple(batch[0].shape)} tokens, {hardware([device])}"
    Console(width=120).print(table_of(rows, title))
    if arguments.json:
        about = {
            "command": f"python benchmarks/memory_budget.py {' '.join(sys.argv[1:])}".strip(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "hardware": hardware([device]),
            "versions": versions(),
            "rounds": rounds,
            "seconds": seconds,
        }
        write_json(arguments.json, {**about, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
