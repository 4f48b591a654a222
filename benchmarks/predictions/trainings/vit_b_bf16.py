"""ViT-B/16: bf16, fused AdamW."""

import argparse

import torch
import torch.nn.functional as F
from models.vit import ViT

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = ViT(width=768, layers=12, heads=12).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
images, labels = torch.randn(args.batch, 3, 224, 224).pin_memory(), torch.randint(0, 1000, (args.batch,)).pin_memory()

for step in range(args.steps):
    x, y = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
