# style: gradient accumulation under bf16 autocast, a settings dataclass
# steps: 3
# expect: nothing
# expect: no sync at total

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Settings:
    batch: int = 4
    accumulate: int = 4
    updates: int = 3
    width: int = 32
    lr: float = 3e-4


def batches(settings, device):
    while True:
        x = torch.randn(settings.batch, settings.width).to(device)
        yield x, x.flip(1)


def main(settings):
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.autocast("cuda", dtype=torch.bfloat16) if device_type == "cuda" else nullcontext()
    model = nn.Sequential(nn.Linear(settings.width, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, settings.width))
    model.to(device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.1)
    stream = batches(settings, device_type)
    for _ in range(settings.updates):
        total = 0.0
        for _ in range(settings.accumulate):
            x, y = next(stream)
            with amp:
                loss = nn.functional.mse_loss(model(x), y) / settings.accumulate
            loss.backward()
            total += loss.detach()  # <- total
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"last update: loss {total.item():.4f}")


if __name__ == "__main__":
    main(Settings())
