"""A UNet that segments images of 256x256 pixels: fp32, Adam."""

import argparse

import torch
from models.unet import UNet
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = UNet(classes=2).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
criterion = nn.CrossEntropyLoss()
images, masks = torch.randn(args.batch, 3, 256, 256), torch.randint(0, 2, (args.batch, 256, 256))

for step in range(args.steps):
    x, y = images.to(device), masks.to(device)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
