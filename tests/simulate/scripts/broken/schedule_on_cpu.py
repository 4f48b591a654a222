# why: the table of the schedule stays on the CPU and is indexed by CUDA time steps, which is refused; what it gives
#      is then mixed with CUDA images.
# twin: diffusion.py
# steps: 4
# expect: mixed-devices error at lookup
# expect: maybe mixed-devices error at mix

import torch
import torch.nn as nn
import torch.nn.functional as F

T = 50


class Schedule:
    def __init__(self, device):
        betas = torch.linspace(1e-4, 0.02, T)
        self.kept = torch.cumprod(1 - betas, dim=0)

    def noisy(self, x, t, noise):
        kept = self.kept[t].view(-1, 1)  # <- lookup
        return kept.sqrt() * x + (1 - kept).sqrt() * noise  # <- mix


class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.enter = nn.Linear(2, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.body(self.enter(x) + self.time(t))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model, schedule = Denoiser().to(device), Schedule(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
moons = torch.randn(128, 2)
for x in moons.split(32):
    x = x.to(device)
    t = torch.randint(T, (len(x),), device=device)
    noise = torch.randn_like(x)
    loss = F.mse_loss(model(schedule.noisy(x, t, noise), t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad():
    sample = torch.randn(5, 2, device=device)
    for step in reversed(range(0, T, 10)):
        t = torch.full((5,), step, dtype=torch.long, device=device)
        sample = sample - 0.1 * model(sample, t)
print(loss.item(), sample.cpu().numpy().shape)
