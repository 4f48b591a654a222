"""MobileNetV2 for images of 160x160 pixels: bf16, channels last, RMSprop, a learning rate that decays."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
# how much wider inside, channels, how many blocks, the first one's stride
stages = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]


def conv(inputs, outputs, kernel, stride=1, groups=1):
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    ]


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride, widening):
        super().__init__()
        hidden = inputs * widening
        self.adds = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            *(conv(inputs, hidden, 1) if widening > 1 else []),
            *conv(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x):
        return x + self.layers(x) if self.adds else self.layers(x)


layers, inputs = conv(3, 32, 3, 2), 32
for widening, outputs, count, stride in stages:
    for number in range(count):
        layers.append(InvertedResidual(inputs, outputs, 1 if number else stride, widening))
        inputs = outputs
layers += conv(inputs, 1280, 1)
head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000)]
model = nn.Sequential(*layers, *head).to(device, memory_format=torch.channels_last)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9, momentum=0.9, weight_decay=4e-5)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
images, labels = torch.randn(args.batch, 3, 160, 160).pin_memory(), torch.randint(0, 1000, (args.batch,)).pin_memory()

for step in range(args.steps):
    x = images.to(device, non_blocking=True, memory_format=torch.channels_last)
    y = labels.to(device, non_blocking=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
