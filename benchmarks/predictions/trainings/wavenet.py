"""WaveNet over 8,192 samples of sound in 256 steps of loudness: causal dilated convolutions, fp32, Adam."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
length, classes = 8192, 256


class CausalConv(nn.Conv1d):
    def __init__(self, inputs, outputs, dilation=1):
        super().__init__(inputs, outputs, 2, dilation=dilation)

    def forward(self, x):
        return super().forward(F.pad(x, (self.dilation[0], 0)))


class Block(nn.Module):
    def __init__(self, width, skip, dilation):
        super().__init__()
        self.filter, self.gate = CausalConv(width, width, dilation), CausalConv(width, width, dilation)
        self.out, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, skip, 1)

    def forward(self, x):
        y = torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x))
        return x + self.out(y), self.skip(y)


class WaveNet(nn.Module):
    def __init__(self, width=64, skip=256, stacks=3, depth=10):
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.first = CausalConv(width, width)
        self.blocks = nn.ModuleList(Block(width, skip, 2**level) for _ in range(stacks) for level in range(depth))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, classes, 1))

    def forward(self, sound):
        x = self.first(self.embed(sound).transpose(1, 2))
        total = 0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return self.head(total)


model = WaveNet().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
sounds = torch.randint(0, classes, (args.batch, length + 1))

for step in range(args.steps):
    sound = sounds.to(device)
    scores = model(sound[:, :-1])
    loss = criterion(scores, sound[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
