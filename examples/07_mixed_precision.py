"""Mixed precision: half the bits where they are not needed, and the care that fp16 asks for."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import hotloop

STEPS = 60


def make_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A made-up regression with large targets, so that the first gradients overflow in fp16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, 64, 8, generator=generator)
    return [(batch, 40 * batch[:, :1] + 20) for batch in x]


def make_model() -> tuple[nn.Module, torch.optim.Optimizer, LinearLR]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return model, optimizer, LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)


def plain() -> None:
    print("--- Plain PyTorch, fp16 by hand ---")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer, scheduler = make_model()
    model.to(device)
    scaler = torch.amp.GradScaler(device.type)  # multiplies the loss, so that small gradients survive fp16
    skipped = 0
    for x, y in make_data():
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):  # the forward pass only
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)  # skips the step if a gradient is infinite ...
        scaler.update()  # ... and then halves the scale
        if scaler.get_scale() < before:
            skipped += 1
        else:
            scheduler.step()  # most tutorials forget this `else`
    print(f"fp16: loss {loss.item():6.2f} on {device}; the scale ends at {scaler.get_scale():,.0f}")
    print(f"skipped {skipped} of {STEPS} steps; the scheduler moved {scheduler.last_epoch} times")


def train(precision: str) -> None:
    model, optimizer, scheduler = make_model()
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), precision=precision, scheduler=scheduler)
    for batch in loop.batches(make_data()):
        loss = loop.step(batch)
    counts = f"loop.steps {loop.steps}, loop.skipped {loop.skipped}, the scheduler moved {scheduler.last_epoch} times"
    print(f"{precision}: loss {loss.item():6.2f} on {loop.device}; {counts}")


def with_hotloop() -> None:
    print("\n--- With hotloop: one word ---")
    for precision in ("fp32", "bf16", "fp16"):
        train(precision)
    print(f"steps + skipped = {STEPS} batches. The scheduler never moves for a step that was skipped,")
    print("and fp16 ends a little behind, because its first steps were spent on finding a scale.")

    choice = hotloop.pick()
    print('\nprecision="auto", the default, begins in fp32. Where a run is long enough to be tuned, half precision')
    print("is kept if it is faster and the loss stays with the plain run.")
    print(f"The fastest that this device is good at is {choice.precision}. {choice.reason}")
    print("bf16 has the range of fp32, so it needs no scaler; fp16 is for GPUs that are too old for bf16.")


def main() -> None:
    plain()
    with_hotloop()


if __name__ == "__main__":
    main()
