"""A wide multi-layer perceptron on rows of numbers: fp32, Adagrad."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8192)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
layers = [nn.Linear(512, 4096), nn.ReLU()]
for _ in range(4):
    layers += [nn.Linear(4096, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Dropout(0.1)]
model = nn.Sequential(*layers, nn.Linear(4096, 1)).to(device)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
rows, targets = torch.randn(args.batch, 512), torch.randn(args.batch, 1)

for step in range(args.steps):
    x, y = rows.to(device), targets.to(device)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
