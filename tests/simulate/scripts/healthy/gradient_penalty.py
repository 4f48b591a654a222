# style: WGAN with a gradient penalty, so a backward through a backward
# steps: 1
# updates: 5
# expect: nothing

import torch
import torch.nn as nn
from torch import autograd

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
one = torch.tensor(1.0)

critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(device)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))


def penalty(real, fake):
    alpha = torch.rand(len(real), 1, device=real.device)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(between)
    (gradient,) = autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
    return ((gradient.norm(2, dim=1) - one) ** 2).mean()


def ring(n):
    angle = torch.rand(n) * 6.283
    return torch.stack([angle.cos(), angle.sin()], dim=1)


for step in range(4):
    real = ring(16).to(device)
    fake = generator(torch.randn(16, 4, device=device)).detach()
    loss_c = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
    optimizer_c.zero_grad()
    loss_c.backward()
    optimizer_c.step()
    if step % 4 == 3:
        loss_g = -critic(generator(torch.randn(16, 4, device=device))).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
print("critic", loss_c.item(), "generator", loss_g.item())
