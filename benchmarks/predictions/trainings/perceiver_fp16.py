"""A Perceiver: 256 latents look at the 4,096 pixels of an image: fp16 with a gradient scaler, clipping, AdamW."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
side, bands, classes = 64, 32, 200
latents, width, heads, rounds, depth = 256, 512, 8, 2, 4
pixel_width = 3 + 2 * (2 * bands + 1)  # a colour, and where it is


class Attention(nn.Module):
    def __init__(self, memory_width=width):
        super().__init__()
        self.query, self.memory = nn.Linear(width, width, bias=False), nn.Linear(memory_width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x, memory):
        key, value = self.memory(memory).chunk(2, dim=-1)
        q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (self.query(x), key, value))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class GatedGELU(nn.Module):
    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return x * F.gelu(gate)


def feed_forward():
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 8 * width), GatedGELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
    )


class CrossBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.memory_norm = nn.LayerNorm(width), nn.LayerNorm(pixel_width)
        self.attention, self.mlp = Attention(pixel_width), feed_forward()

    def forward(self, x, pixels):
        x = x + self.attention(self.norm(x), self.memory_norm(pixels))
        return x + self.mlp(x)


class SelfBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), Attention(), feed_forward()

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y)
        return x + self.mlp(x)


def fourier_features():
    axis = torch.linspace(-1, 1, side)
    places = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1).flatten(0, 1)
    angles = places[..., None] * math.pi * torch.linspace(1, side / 2, bands)
    return torch.cat([angles.sin(), angles.cos(), places[..., None]], dim=-1).flatten(1)


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("places", fourier_features())
        self.latents = nn.Parameter(0.02 * torch.randn(latents, width))
        self.across = nn.ModuleList(CrossBlock() for _ in range(rounds))
        self.within = nn.ModuleList(nn.Sequential(*(SelfBlock() for _ in range(depth))) for _ in range(rounds))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images):
        count = len(images)
        colours = images.flatten(2).transpose(1, 2)
        pixels = torch.cat([colours, self.places.expand(count, -1, -1)], dim=-1)
        x = self.latents.expand(count, -1, -1)
        for across, within in zip(self.across, self.within, strict=True):
            x = within(across(x, pixels))
        return self.head(x.mean(dim=1))


model = Perceiver().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1)
scaler = torch.amp.GradScaler(device)
images, labels = torch.randn(args.batch, 3, side, side), torch.randint(0, classes, (args.batch,))

for step in range(args.steps):
    x, y = images.to(device), labels.to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
