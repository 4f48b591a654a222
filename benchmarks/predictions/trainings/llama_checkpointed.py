"""A Llama-style model with grouped queries: bf16, activation checkpointing, AdamW."""

import argparse

import torch
import torch.nn.functional as F
from models.llama import Llama

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = Llama(checkpointing=True).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
tokens = torch.randint(0, 32000, (args.batch, 1025))

for step in range(args.steps):
    text = tokens.to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        scores = model(text[:, :-1])
    loss = F.cross_entropy(scores.flatten(0, 1).float(), text[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
