"""A T5-like encoder and decoder whose attention has a learned bias: bf16, Adam."""

import argparse

import torch
import torch.nn.functional as F
from models.t5 import T5

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = T5().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
source, target = torch.randint(0, 32128, (args.batch, 512)), torch.randint(0, 32128, (args.batch, 129))

for step in range(args.steps):
    text, wanted = source.to(device), target.to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        scores = model(text, wanted[:, :-1])
        loss = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), wanted[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
