# style: every mix of devices that PyTorch allows: CPU scalars, CPU indices and masks, copies between devices
# steps: 3
# expect: nothing

import math

import numpy as np
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(6, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(30, 6, device=device)
labels = torch.randint(3, (30,), device=device)
scale = torch.tensor(0.5)
weights = torch.tensor([1.0, 2.0, 3.0])
total = torch.tensor(0.0)
kept = torch.zeros(30, 3)

for step in range(3):
    rows = torch.randperm(30)[:10]
    x = data[rows]
    x = x * scale + np.float32(0.1) - math.pi / 7
    x = torch.where(x > 2, torch.tensor(2.0), x)
    logits = model(x)
    loss = weights[step] * nn.functional.cross_entropy(logits, labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = total + loss.detach()
    kept[:10] = logits.detach()
    kept[10:20].copy_(logits.detach())

every_other = torch.arange(30) % 2 == 0
print("half of them:", data[every_other].shape[0])
data[torch.tensor([0, 1])] = torch.tensor(0.0)
data[2:4] = torch.ones(2, 6)
model.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
print("total", float(total), "kept", tuple(kept.shape), max(range(3), key=lambda i: weights[i]))
