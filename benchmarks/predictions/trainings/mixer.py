"""MLP-Mixer S/16: fp32 with TF32 in its products, Adam."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
torch.set_float32_matmul_precision("high")


class MLP(nn.Sequential):
    def __init__(self, width, hidden):
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Block(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.across_patches = nn.LayerNorm(width), MLP(patches, 256)
        self.norm2, self.across_channels = nn.LayerNorm(width), MLP(width, 2048)

    def forward(self, x):
        x = x + self.across_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.across_channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width=512, layers=8, pixels=224, patch=16, classes=1000):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(Block((pixels // patch) ** 2, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


model = Mixer().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
images, labels = torch.randn(args.batch, 3, 224, 224), torch.randint(0, 1000, (args.batch,))

for step in range(args.steps):
    x, y = images.to(device), labels.to(device)
    scores = model(x)
    loss = criterion(scores, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        right = (scores.argmax(dim=1) == y).float().mean()
        print(f"step {step}: loss {loss.item():.4f}, {right.item():.1%} right")
