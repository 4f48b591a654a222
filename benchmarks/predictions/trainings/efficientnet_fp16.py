"""EfficientNet-B0, with squeeze and excitation and stochastic depth: fp16 with a gradient scaler, AdamW."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
# how much wider inside, channels, how many blocks, the first one's stride, kernel
stages = [
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
]


def conv(inputs, outputs, kernel, stride=1, groups=1):
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01))


class Excitation(nn.Module):
    def __init__(self, width, squeezed):
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)

    def forward(self, x):
        share = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(share))))


class Block(nn.Module):
    def __init__(self, inputs, outputs, widening, stride, kernel, dropped):
        super().__init__()
        hidden = inputs * widening
        self.adds, self.dropped = stride == 1 and inputs == outputs, dropped
        self.expand = conv(inputs, hidden, 1) if widening > 1 else None
        self.depthwise = conv(hidden, hidden, kernel, stride, groups=hidden)
        self.excitation = Excitation(hidden, max(1, inputs // 4))
        self.project = conv(hidden, outputs, 1)

    def forward(self, x):
        y = x if self.expand is None else F.silu(self.expand(x))
        y = self.project(self.excitation(F.silu(self.depthwise(y))))
        if not self.adds:
            return y
        if self.training and self.dropped:
            kept = torch.rand(len(x), 1, 1, 1, device=x.device) >= self.dropped
            y = y * kept / (1 - self.dropped)
        return x + y


layers, inputs = [conv(3, 32, 3, 2), nn.SiLU()], 32
total = sum(count for _, _, count, _, _ in stages)
for widening, outputs, count, stride, kernel in stages:
    for number in range(count):
        dropped = 0.2 * (len(layers) - 2) / total
        layers.append(Block(inputs, outputs, widening, 1 if number else stride, kernel, dropped))
        inputs = outputs
head = [conv(inputs, 1280, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000)]
model = nn.Sequential(*layers, *head).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
scaler = torch.amp.GradScaler(device)
images, labels = torch.randn(args.batch, 3, 224, 224), torch.randint(0, 1000, (args.batch,))

for step in range(args.steps):
    x, y = images.to(device), labels.to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
