"""A bidirectional GRU that sorts sequences of measurements: fp32, Adam."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(64, 512, num_layers=3, bidirectional=True, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 20))

    def forward(self, x):
        outputs, _ = self.cells(x)
        return self.head(outputs.mean(dim=1))


model = Classifier().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
signals, labels = torch.randn(args.batch, 256, 64), torch.randint(0, 20, (args.batch,))

for step in range(args.steps):
    x, y = signals.to(device), labels.to(device)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
