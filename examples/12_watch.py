"""What did training ask of the hardware? hotloop.watch around a plain PyTorch loop."""

import time

import torch
from torch import nn

import hotloop
from hotloop.printing.text import duration, size

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SECONDS = 2.0  # long enough for a few samples
BATCH = 256


def train() -> int:
    """A plain loop on made-up numbers for two seconds; returns how many items it was trained on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    inputs, targets = torch.rand(BATCH, 128, device=DEVICE), torch.randint(10, (BATCH,), device=DEVICE)
    items, end = 0, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
        items += BATCH
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # the GPU may still be at it
    return items


def known(value: float | None, unit: str) -> str:
    """What was not told is unknown, and never 0."""
    return "unknown" if value is None else f"{value:,.0f}{unit}"


def plain() -> None:
    print("--- Plain PyTorch: how long it took ---")
    print(f"{train():,} items in {duration(SECONDS)} on {DEVICE}")
    print("A time is all you get: not how busy the hardware was, and not what it cost.")


def with_hotloop() -> None:
    print("\n--- With hotloop: the same loop, watched from a thread ---")
    # By default it tells of the GPUs that this program uses; trained on a CPU, it uses none of those that may be here.
    with hotloop.watch(gpus=None if DEVICE.type == "cuda" else []) as watching:
        items = train()
    load = watching.load
    print(f"{items:,} items; {load.samples} samples in {duration(load.seconds)}")
    print(f"CPU of the host: {known(load.cpu, '%')} of all cores in the mean, whoever used them")
    for gpu in load.gpus:
        print(f"GPU {gpu.index} ({gpu.name}):")
        print(f"  utilisation: {known(gpu.utilisation, '%')} in the mean, 95% of the time at most", end=" ")
        print(known(gpu.utilisation_p95, "%"))
        print(f"  memory: {size(gpu.memory_peak)} at most, of {size(gpu.memory_total)}")
        print(f"  power: {known(gpu.power, ' W')} in the mean; at most {known(gpu.temperature, ' °C')}")
        print(f"  throttled: {', '.join(gpu.reasons) or 'no'}")
    per_thousand = load.joules_per(items)
    print(f"energy of the GPUs: {known(load.joules, ' J')}", end="")
    print("" if per_thousand is None else f", {per_thousand:.3g} J for 1,000 items")
    for note in load.notes:
        print(f"note: {note}")


def main() -> None:
    plain()
    with_hotloop()


if __name__ == "__main__":
    main()
