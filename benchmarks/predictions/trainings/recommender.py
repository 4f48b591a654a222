"""A recommender, mostly embeddings of categories: fp32, Adagrad."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16384)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
tables, rows, width = 26, 100_000, 64


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.categories = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.numbers = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, numbers, categories):
        dense = self.numbers(numbers)
        vectors = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.categories))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        left, right = torch.tril_indices(tables + 1, tables + 1, offset=-1, device=numbers.device)
        return self.top(torch.cat([dense, products[:, left, right]], dim=1)).squeeze(1)


model = Recommender().to(device)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
criterion = nn.BCEWithLogitsLoss()
numbers, clicks = torch.rand(args.batch, 13), torch.randint(0, 2, (args.batch,)).float()
categories = torch.randint(0, rows, (args.batch, tables))

for step in range(args.steps):
    x, chosen, y = numbers.to(device), categories.to(device), clicks.to(device)
    loss = criterion(model(x, chosen), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
