"""What hotloop itself costs or takes: a step beside raw PyTorch, a hook, the golden rule, the making of sprites.

python benchmarks/overheads.py --json benchmarks/results/overheads.json
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotloop
from harness.about import facts
from hotloop.apps.sprites.making import make
from hotloop.device.clock import synchronize
from hotloop.records.files import write_json

QUIET = 0.1  # of the steps, the quickest: those in which nothing else had the core


KINDS: dict[str, dict[str, Any]] = {
    "a plain step": {},
    "a step in bf16": {"precision": "bf16"},
    "a step that clips": {"clip_norm": 1.0},
    "a batch of two that accumulate": {"accumulate": 2},
}


def step_overhead(device: torch.device, steps: int, options: dict[str, Any]) -> dict[str, float]:
    """Host time of a step of the tutorial's small network, raw and by `Loop(plan="plain")`, in turns of two steps.

    The first step of a turn finds the code of its loop cold and is left out; the clock of the second stops before the
    device has caught up. On a machine with other tenants neighbouring steps have the same of them, so that what is
    compared are pairs of neighbours, and the quickest tenth of each. The spread is that of tenths of the run.
    """
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer, criterion = torch.optim.Adam(model.parameters()), nn.MSELoss()
    batch = [torch.randn(64, 16, device=device), torch.zeros(64, 1, device=device)]
    loop = hotloop.Loop(model, optimizer, criterion, device=device, plan="plain", **options)
    epoch = loop.batches([batch])  # stays open: a step knows the batch that its epoch has given out
    given = next(epoch)

    half = torch.autocast(device.type, torch.bfloat16, enabled="precision" in options)
    accumulate, batches = options.get("accumulate", 1), count()

    def raw() -> None:
        number = next(batches)
        if number % accumulate == 0:
            optimizer.zero_grad()
        with half:
            loss = criterion(model(batch[0]), batch[1])
        (loss / accumulate if accumulate > 1 else loss).backward()
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        if number % accumulate == accumulate - 1:
            optimizer.step()

    def ours() -> None:
        loop.step(given)

    times: dict[Callable[[], None], list[float]] = {raw: [], ours: []}
    for turn in range(steps + 20):
        for call in (raw, ours) if turn % 2 else (ours, raw):
            call()
            taken = _host_time(call)
            if turn >= 20:
                times[call].append(taken)
        if turn % 50 == 0:
            synchronize(device)
    more = [a - b for a, b in zip(times[ours], times[raw], strict=True)]
    each = len(more) // 10
    tenths = sorted(statistics.median(more[i : i + each]) for i in range(0, 10 * each, each))
    return {
        "raw": statistics.median(times[raw]),
        "over": statistics.median(more),
        "over_low": tenths[0],
        "over_high": tenths[-1],
        "raw_quiet": _quiet(times[raw]),
        "over_quiet": _quiet(times[ours]) - _quiet(times[raw]),
    }


def evaluation_overhead(device: torch.device, batches: int) -> dict[str, float]:
    """Time of a batch of an evaluation by hand and by `Loop.evaluate`, over many batches on the device."""
    model, criterion = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device), nn.MSELoss()
    data = [[torch.randn(64, 16, device=device), torch.zeros(64, 1, device=device)]] * batches
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), criterion, device=device, plan="plain")

    @torch.inference_mode()
    def raw() -> float:
        total = torch.zeros((), device=device)
        for x, y in data:
            total += criterion(model(x), y) * len(x)
        return float(total)

    figures = {"raw": hotloop.measure(raw, repeats=7), "over": hotloop.measure(lambda: loop.evaluate(data), repeats=7)}
    each = {name: timing.median / batches for name, timing in figures.items()}
    return {"raw": each["raw"], "over": each["over"] - each["raw"]}


def _host_time(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def hook_cost(device: torch.device, steps: int, turns: int = 6) -> dict[str, float]:
    """Time of a step in `fit` without a hook, and what an empty `on_step` adds: the quickest epochs, by turns."""
    model, criterion = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), nn.MSELoss()
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), criterion, device=device, plan="plain")
    data = [[torch.randn(64, 16), torch.zeros(64, 1)]] * steps
    hooks: dict[str, Any] = {"without": None, "over": lambda record: None}
    taken: dict[str, list[float]] = {name: [] for name in hooks}
    for _ in range(turns):
        for name, hook in hooks.items():
            report = loop.fit(data, epochs=1, on_step=hook, progress=False, monitor=False)
            taken[name].append(report.epochs[-1].seconds / steps)
    without = min(taken["without"])
    return {"without": without, "over": min(taken["over"]) - without}


def _quiet(times: list[float]) -> float:
    return sorted(times)[int(QUIET * len(times))]


def golden_rule_cost() -> dict[str, float]:
    """One small addition on the host, outside and inside the rule."""
    x = torch.ones(4)
    outside = hotloop.measure(lambda: x + x).median
    with hotloop.golden_rule():
        inside = hotloop.measure(lambda: x + x).median
    return {"outside": outside, "inside": inside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few repeats only, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--steps", type=int, default=6000, metavar="N", help="plain steps that are timed [6000]")
    arguments = parser.parse_args()
    choice = hotloop.pick()
    steps, sprites = (200, 256) if arguments.quick else (arguments.steps, 20_000)
    every = {
        kind: step_overhead(choice.device, steps // (4 if options else 1), options) for kind, options in KINDS.items()
    }
    evaluation, rule = evaluation_overhead(choice.device, steps // 10), golden_rule_cost()
    hook = hook_cost(choice.device, steps // 4)
    making = hotloop.measure(lambda: make(sprites, device=choice.device), device=choice.device, warmup=1, repeats=5)
    print(f"on {choice.device} ({choice.name}), torch {torch.__version__}")
    for kind, step in every.items():
        print(
            f"{kind}: {step['raw'] * 1e6:.0f} µs raw, {step['over'] * 1e6:+.0f} µs by Loop"
            f" (tenths: {step['over_low'] * 1e6:+.0f} to {step['over_high'] * 1e6:+.0f}), of the host's time;"
            f" the quickest tenth {step['raw_quiet'] * 1e6:.0f} µs and {step['over_quiet'] * 1e6:+.0f} µs"
        )
    print(f"a batch of an evaluation: {evaluation['raw'] * 1e6:.0f} µs raw, {evaluation['over'] * 1e6:+.0f} µs by Loop")
    print(f"an empty on_step: {hook['over'] * 1e6:+.1f} µs of a step of {hook['without'] * 1e6:.0f} µs in fit")
    print(f"the golden rule: an addition takes {rule['inside'] * 1e6:.0f} µs instead of {rule['outside'] * 1e6:.1f} µs")
    print(f"sprites made: {sprites / making.median:,.0f} per second, spread {making.spread:.0%}")
    if arguments.json:
        figures = {
            "step": every["a plain step"],
            "steps": every,
            "evaluation": evaluation,
            "golden_rule": rule,
            "hook": hook,
        }
        figures["sprites_per_second"] = sprites / making.median
        write_json(arguments.json, facts([choice.device]) | figures)


if __name__ == "__main__":
    main()
