"""A Whisper-like model that writes down speech from spectrograms: bf16, fused AdamW."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
bands, frames, length, vocabulary, width, heads = 80, 3000, 224, 51865, 512, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, x, memory, causal=False):
        q, k, v = (
            f(t).unflatten(2, (heads, -1)).transpose(1, 2)
            for f, t in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder
        self.norm1, self.attention = nn.LayerNorm(width), Attention()
        if decoder:
            self.norm2, self.across = nn.LayerNorm(width), Attention()
        mlp = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = nn.Sequential(nn.LayerNorm(width), *mlp)

    def forward(self, x, memory=None):
        y = self.norm1(x)
        x = x + self.attention(y, y, causal=self.decoder)
        if self.decoder:
            x = x + self.across(self.norm2(x), memory)
        return x + self.mlp(x)


class Speech(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(bands, width, 3, padding=1), nn.Conv1d(width, width, 3, 2, 1)
        rates = torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2 - 1))
        angles = torch.arange(frames // 2)[:, None] * rates
        self.register_buffer("moments", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.encoder, self.between = nn.ModuleList(Layer(decoder=False) for _ in range(layers)), nn.LayerNorm(width)
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.places = nn.Parameter(0.01 * torch.randn(length, width))
        self.decoder = nn.ModuleList(Layer(decoder=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, sound, tokens):
        x = F.gelu(self.conv2(F.gelu(self.conv1(sound)))).transpose(1, 2) + self.moments
        for layer in self.encoder:
            x = layer(x)
        memory = self.between(x)
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for layer in self.decoder:
            x = layer(x, memory)
        return self.norm(x) @ self.tokens.weight.T


model = Speech().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
spectrograms = torch.randn(args.batch, bands, frames).pin_memory()
texts = torch.randint(0, vocabulary, (args.batch, length + 1)).pin_memory()

for step in range(args.steps):
    sound, text = spectrograms.to(device, non_blocking=True), texts.to(device, non_blocking=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        scores = model(sound, text[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
