"""A diffusion model: a UNet with attention that guesses noise, and a moving average of its weights: bf16, AdamW."""

import argparse

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"


class Residual(nn.Module):
    def __init__(self, inputs, outputs, times=512):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(times, outputs)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.short(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(32, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x):
        batch, width, high, wide = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, self.heads, -1, high * wide).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(2, 3).reshape(batch, width, high, wide))


class UNet(nn.Module):
    def __init__(self, width=128, multiples=(1, 2, 2, 4)):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 512), nn.SiLU(), nn.Linear(512, 512))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up, skips, inputs = nn.ModuleList(), nn.ModuleList(), [width], width
        for level, multiple in enumerate(multiples):
            for _ in range(2):
                attention = Attention(width * multiple) if level >= 2 else nn.Identity()
                self.down.append(nn.ModuleList([Residual(inputs, width * multiple), attention]))
                inputs = width * multiple
                skips.append(inputs)
            if level < len(multiples) - 1:
                self.down.append(nn.Conv2d(inputs, inputs, 3, 2, 1))
                skips.append(inputs)
        self.middle = nn.ModuleList([Residual(inputs, inputs), Attention(inputs), Residual(inputs, inputs)])
        for level, multiple in reversed(list(enumerate(multiples))):
            for _ in range(3):
                attention = Attention(width * multiple) if level >= 2 else nn.Identity()
                self.up.append(nn.ModuleList([Residual(inputs + skips.pop(), width * multiple), attention]))
                inputs = width * multiple
            if level:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(inputs, inputs, 3, padding=1)))
        self.last = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, 3, 3, padding=1))

    def forward(self, x, moments):
        rates = torch.exp(-math.log(10000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = moments[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        skips = [self.first(x)]
        for layer in self.down:
            if isinstance(layer, nn.ModuleList):
                residual, attention = layer
                skips.append(attention(residual(skips[-1], time)))
            else:
                skips.append(layer(skips[-1]))
        first, attention, second = self.middle
        x = second(attention(first(skips[-1], time)), time)
        for layer in self.up:
            if isinstance(layer, nn.ModuleList):
                residual, attention = layer
                x = attention(residual(torch.cat([x, skips.pop()], dim=1), time))
            else:
                x = layer(x)
        return self.last(x)


model = UNet().to(device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), dim=0)
images = torch.randn(args.batch, 3, 64, 64)

for step in range(args.steps):
    x = images.to(device)
    moments = torch.randint(0, 1000, (args.batch,), device=device)
    share = kept[moments][:, None, None, None]
    noise = torch.randn_like(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        guess = model(share.sqrt() * x + (1 - share).sqrt() * noise, moments)
    loss = F.mse_loss(guess.float(), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, weight in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(weight, 0.001)
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
