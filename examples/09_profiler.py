"""Where does the time go? torch.profiler around a plain loop, then around hotloop's."""

from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import hotloop
from hotloop.text import duration

STEPS = 6


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 5)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Made-up pictures of 32 x 32 pixels."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.rand(32, 3, 32, 32, generator=generator), torch.randint(5, (32,), generator=generator))
        for _ in range(STEPS)
    ]


def profiled(train: Callable[[Callable[[], None]], None]) -> None:
    """Run `train(tick)` under the profiler: 1 step ignored, 2 to warm up, 3 recorded."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=1, warmup=2, active=3, repeat=1)
    with profile(activities=activities, schedule=plan, acc_events=True) as profiler:
        train(profiler.step)
    # profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=8) prints all columns; these are enough:
    print(f"{'operation':36} {'calls':>5} {'on the CPU':>11} {'on the GPU':>11}")
    operations = [event for event in profiler.key_averages() if event.key.startswith("aten::")]  # PyTorch's own
    operations.sort(key=lambda event: event.self_cpu_time_total + event.self_device_time_total, reverse=True)
    for event in operations[:8]:
        on_cpu, on_gpu = event.self_cpu_time_total / 1e6, event.self_device_time_total / 1e6  # from microseconds
        print(f"{event.key:36} {event.count:>5} {duration(on_cpu):>11} {duration(on_gpu) if on_gpu else '-':>11}")


def plain() -> None:
    print("--- Plain PyTorch: 3 steps ---")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer = make_model()
    model.to(device)
    criterion, batches = nn.CrossEntropyLoss(), make_batches()

    def train(tick: Callable[[], None]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            loss = criterion(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            tick()  # tells the profiler that a step is over

    profiled(train)


def with_hotloop() -> None:
    print("\n--- With hotloop: 3 steps ---")
    model, optimizer = make_model()
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss())
    batches = make_batches()

    def train(tick: Callable[[], None]) -> None:
        for batch in loop.batches(batches):
            loop.step(batch)
            tick()

    profiled(train)

    # The profiler says where the time goes; it also slows things down. For how long, measure without it.
    batch = hotloop.move(batches[0], loop.device)
    step = hotloop.measure(lambda: loop.step(batch), device=loop.device, repeats=10)
    print(f"\nhotloop.measure: one step on {loop.device} takes {duration(step.median)}")
    print(f"(9 of 10 take {duration(step.low)} to {duration(step.high)})")


def main() -> None:
    plain()
    with_hotloop()


if __name__ == "__main__":
    main()
