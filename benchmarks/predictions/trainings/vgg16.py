"""VGG-16 for images of 224x224 pixels: fp32, SGD with momentum."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
layers, inputs = [], 3
for width in (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool"):
    if width == "pool":
        layers.append(nn.MaxPool2d(2))
    else:
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
        inputs = width
model = nn.Sequential(
    *layers,
    nn.Flatten(),
    nn.Linear(512 * 7 * 7, 4096),
    nn.ReLU(inplace=True),
    nn.Dropout(),
    nn.Linear(4096, 4096),
    nn.ReLU(inplace=True),
    nn.Dropout(),
    nn.Linear(4096, 1000),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
criterion = nn.CrossEntropyLoss()
images, labels = torch.randn(args.batch, 3, 224, 224), torch.randint(0, 1000, (args.batch,))

for step in range(args.steps):
    x, y = images.to(device), labels.to(device)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
