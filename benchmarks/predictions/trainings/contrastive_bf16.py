"""SimCLR: a ResNet-18 tells two views of an image of 64x64 pixels from all others: bf16, fused AdamW."""

import argparse

import torch
import torch.nn.functional as F
from models.resnet import Basic
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
temperature = 0.5


class Encoder(nn.Module):
    def __init__(self, widths=(64, 128, 256, 512), projected=128):
        super().__init__()
        # the images are small, so nothing is made smaller before the first blocks
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        layers, inputs = [], 64
        for stage, width in enumerate(widths):
            layers += [Basic(inputs, width, 2 if stage else 1), Basic(width, width, 1)]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.projection = nn.Sequential(
            nn.Linear(inputs, inputs, bias=False),
            nn.BatchNorm1d(inputs),
            nn.ReLU(inplace=True),
            nn.Linear(inputs, projected, bias=False),
        )

    def forward(self, x):
        x = F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1)
        return self.projection(x)


def nt_xent(z, count):
    z = F.normalize(z, dim=1)
    likeness = z @ z.T / temperature
    itself = torch.eye(2 * count, dtype=torch.bool, device=z.device)
    likeness = likeness.masked_fill(itself, float("-inf"))
    partner = torch.arange(2 * count, device=z.device).roll(count)
    return F.cross_entropy(likeness, partner)


model = Encoder().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
first_views = torch.randn(args.batch, 3, 64, 64).pin_memory()
second_views = torch.randn(args.batch, 3, 64, 64).pin_memory()

for step in range(args.steps):
    views = torch.cat([first_views.to(device, non_blocking=True), second_views.to(device, non_blocking=True)])
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = nt_xent(model(views), args.batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
