"""A wide ResNet for small images, whose steps are made of four batches: fp16, scaled and clipped gradients, SGD."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
accumulation = 4


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None

    def forward(self, x):
        y = F.relu(self.bn1(x))
        short = x if self.short is None else self.short(y)
        return short + self.conv2(F.relu(self.bn2(self.conv1(y))))


widths = (16, 160, 320, 640)
blocks = [
    Block(a if not number else b, b, 2 if stage and not number else 1)
    for stage, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
    for number in range(4)
]
head = [nn.BatchNorm2d(640), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(640, 100)]
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), *blocks, *head).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
scaler = torch.amp.GradScaler()
images, labels = torch.randn(args.batch, 3, 32, 32), torch.randint(0, 100, (args.batch,))

for number in range(args.steps * accumulation):
    x, y = images.to(device), labels.to(device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x), y) / accumulation
    scaler.scale(loss).backward()
    if (number + 1) % accumulation == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {number // accumulation}: loss {loss.item() * accumulation:.4f}")
