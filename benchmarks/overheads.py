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

import torch
from torch import nn

import hotloop
from hotloop.clock import synchronize
from hotloop.sprites.making import make

BLOCK = 50  # steps in a row, as in a training: alternating single ones would find the code of each cold


def step_overhead(device: torch.device, blocks: int) -> dict[str, float]:
    """Host time of a step of the tutorial's small network, raw and by `Loop(plan="plain")`, in blocks that take turns.

    The clock of a block stops before the device has caught up. Each block is compared with its neighbour, and of these
    differences the median and the quartiles are told, which what the machine does now and then does not move.
    """
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

    over, plain = [], []
    for number in range(blocks + 2):
        taken = {call: _host_time(call, device) for call in ((raw, ours) if number % 2 else (ours, raw))}
        if number >= 2:
            over.append(taken[ours] - taken[raw])
            plain.append(taken[raw])
    low, median, high = statistics.quantiles(over, n=4)
    return {"raw": statistics.median(plain), "over": median, "over_low": low, "over_high": high}


def _host_time(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of the host for each of the calls of a block, which is short enough that no queue fills."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(BLOCK):
        call()
    taken = time.perf_counter() - start
    synchronize(device)
    return taken / BLOCK


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
    blocks, sprites = (4, 256) if arguments.quick else (120, 20_000)
    step, rule = step_overhead(choice.device, blocks), golden_rule_cost()
    making = hotloop.measure(lambda: make(sprites, device=choice.device), device=choice.device, warmup=1, repeats=5)
    print(f"on {choice.device} ({choice.name}), torch {torch.__version__}")
    print(
        f"a step: {step['raw'] * 1e6:.0f} µs raw, {step['over'] * 1e6:.0f} µs more by Loop"
        f" (quartiles: {step['over_low'] * 1e6:.0f} to {step['over_high'] * 1e6:.0f}), of the host's time"
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
