"""ConvNeXt-T, with depthwise convolutions of 7x7: fp32, AdamW."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


widths, depths = (96, 192, 384, 768), (3, 3, 9, 3)
layers = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
    if stage:
        layers += [ChannelNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
    layers += [Block(width) for _ in range(depth)]
head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)]
model = nn.Sequential(*layers, *head).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
images, labels = torch.randn(args.batch, 3, 224, 224), torch.randint(0, 1000, (args.batch,))

for step in range(args.steps):
    x, y = images.to(device), labels.to(device)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
