"""ResNet-50: bf16, channels last, fused AdamW."""

import argparse

import torch
import torch.nn.functional as F
from models.resnet import resnet50

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = resnet50().to(device, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
images, labels = torch.randn(args.batch, 3, 224, 224).pin_memory(), torch.randint(0, 1000, (args.batch,)).pin_memory()

for step in range(args.steps):
    x = images.to(device, non_blocking=True).to(memory_format=torch.channels_last)
    y = labels.to(device, non_blocking=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
