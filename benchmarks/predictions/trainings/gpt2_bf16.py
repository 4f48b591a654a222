"""GPT-2 small: bf16, TF32 for what stays in fp32, fused AdamW."""

import argparse

import torch
from models.gpt import GPT

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
torch.backends.cuda.matmul.allow_tf32 = True
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
tokens = torch.randint(0, 50257, (args.batch, 1025)).pin_memory()

for step in range(args.steps):
    text = tokens.to(device, non_blocking=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(text[:, :-1], text[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
