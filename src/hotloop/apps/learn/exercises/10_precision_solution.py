"""Repair this fp16 training.

The loss is small, so that its gradients become 0 in fp16 and the weights never
move. Scale the loss, so that training works in mixed precision. (bf16, which
has the range of fp32, is right too.)
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
x = torch.rand(64, 8)
y = x.sum(1, keepdim=True)
scaler = torch.amp.GradScaler("cpu")
first = model.weight.detach().clone()

for step in range(10):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y) * 1e-7
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"the weights moved by {(model.weight - first).abs().max():.4f}, loss {loss.item():.1e}")
