"""GPT-2 small: fp32, dropout, AdamW with two groups of parameters, a DataLoader."""

import argparse

import torch
from models.gpt import GPT
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = GPT(dropout=0.1).to(device)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=6e-4, betas=(0.9, 0.95)
)
loader = DataLoader(
    TensorDataset(torch.randint(0, 50257, (args.batch * args.steps, 1025))), batch_size=args.batch, shuffle=True
)

for step, (tokens,) in enumerate(loader):
    text = tokens.to(device)
    loss = model(text[:, :-1], text[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
