"""What hotloop itself costs or takes: a step beside raw PyTorch, the golden rule, the making of sprites.

python benchmarks/overheads.py --json benchmarks/results/overheads.json
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotloop
from hotloop.clock import synchronize
from hotloop.sprites.making import make


def host_seconds(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Seconds of the host for one call: the clock stops before the device has caught up."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    synchronize(device)
    return taken / calls


def step_overhead(device: torch.device, pairs: int, calls: int) -> dict[str, float]:
    """A step of the tutorial's small network, raw and by `Loop(plan="plain")`, in interleaved pairs."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer, criterion = torch.optim.Adam(model.parameters()), nn.MSELoss()
    batch = [torch.randn(64, 16, device=device), torch.zeros(64, 1, device=device)]
    loop = hotloop.Loop(model, optimizer, criterion, device=device, plan="plain")
    epoch = loop.batches([batch])  # stays open: a step knows the batch that its epoch has given out
    given = next(epoch)

    def raw() -> None:
        optimizer.zero_grad()
        criterion(model(batch[0]), batch[1]).backward()
        optimizer.step()

    def ours() -> None:
        loop.step(given)

    for call in (raw, ours):
        host_seconds(call, device, calls)
    times = [(host_seconds(raw, device, calls), host_seconds(ours, device, calls)) for _ in range(pairs)]
    over = sorted(b - a for a, b in times)
    return {
        "raw": statistics.median(a for a, _ in times),
        "over": statistics.median(over),
        "over_low": over[0],
        "over_high": over[-1],
    }


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
    arguments = parser.parse_args()
    choice = hotloop.pick()
    pairs, calls, sprites = (3, 20, 256) if arguments.quick else (15, 200, 20_000)
    step, rule = step_overhead(choice.device, pairs, calls), golden_rule_cost()
    making = hotloop.measure(lambda: make(sprites, device=choice.device), device=choice.device, warmup=1, repeats=5)
    print(f"on {choice.device} ({choice.name}), torch {torch.__version__}")
    print(
        f"a step: {step['raw'] * 1e6:.0f} µs raw, {step['over'] * 1e6:.0f} µs more by Loop"
        f" ({step['over_low'] * 1e6:.0f} to {step['over_high'] * 1e6:.0f}), of the host's time"
    )
    print(f"the golden rule: an addition takes {rule['inside'] * 1e6:.0f} µs instead of {rule['outside'] * 1e6:.1f} µs")
    print(f"sprites made: {sprites / making.median:,.0f} per second, spread {making.spread:.0%}")
    if arguments.json:
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "device": choice.name or str(choice.device)}
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        figures = {"step": step, "golden_rule": rule, "sprites_per_second": sprites / making.median}
        arguments.json.write_text(json.dumps({**about, "versions": versions, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
