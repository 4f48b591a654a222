"""ResNet-18: bf16, channels last, SGD with momentum."""

import argparse

import torch
import torch.nn.functional as F
from models.resnet import resnet18

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = resnet18().to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
images, labels = torch.randn(args.batch, 3, 224, 224).pin_memory(), torch.randint(0, 1000, (args.batch,)).pin_memory()

for step in range(args.steps):
    x = images.to(device, non_blocking=True).to(memory_format=torch.channels_last)
    y = labels.to(device, non_blocking=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
