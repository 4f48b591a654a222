"""DenseNet-121 for images of 128x128 pixels: fp32, SGD with Nesterov's momentum."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
growth = 32


class Layer(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.conv1(self.relu(self.norm1(x)))
        y = self.conv2(self.relu(self.norm2(y)))
        return torch.cat([x, y], dim=1)


class Transition(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.AvgPool2d(2),
        )


class DenseNet(nn.Module):
    def __init__(self, counts=(6, 12, 24, 16), classes=1000):
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        layers = []
        for stage, count in enumerate(counts):
            for _ in range(count):
                layers.append(Layer(width))
                width += growth
            if stage < len(counts) - 1:
                layers.append(Transition(width, width // 2))
                width //= 2
        self.layers = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = F.relu(self.norm(self.layers(self.stem(x))), inplace=True)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


model = DenseNet().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
criterion = nn.CrossEntropyLoss()
images, labels = torch.randn(args.batch, 3, 128, 128), torch.randint(0, 1000, (args.batch,))

for step in range(args.steps):
    x, y = images.to(device), labels.to(device)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
