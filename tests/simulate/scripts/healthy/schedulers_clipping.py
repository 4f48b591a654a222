# style: warm-up and cosine schedulers, gradient clipping, a log line now and then
# steps: 12
# expect: nothing
# expect: no sync at step

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


def build(device):
    model = nn.Sequential(nn.Linear(12, 24), nn.Mish(), nn.Dropout(0.1), nn.Linear(24, 12)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    warm = LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = CosineAnnealingLR(optimizer, T_max=9)
    return model, optimizer, SequentialLR(optimizer, [warm, cosine], milestones=[3])


def train(device, steps=12, log_every=6):
    model, optimizer, scheduler = build(device)
    running = torch.zeros((), device=device)
    for step in range(1, steps + 1):
        x = torch.randn(16, 12, device=device)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        running += loss.detach()  # <- step
        if step % log_every == 0:
            print(f"{step:3d} loss {running.item() / log_every:.4f} lr {scheduler.get_last_lr()[0]:.5f}")
            running.zero_()


train("cuda" if torch.cuda.is_available() else "cpu")
