"""Make this loop hot.

It is the loop of every tutorial, and it is correct. On a GPU it copies each
batch and waits in each step. Change it so that the loop copies nothing and
waits for nothing, and `losses` still holds the loss of each of the 12 steps.
The data is small: it may live on the device.
"""

import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
inputs = torch.rand(256, 8)
targets = inputs[:, :4].argmax(1)
inputs, targets = inputs.to(device), targets.to(device)
model = nn.Linear(8, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

losses = []
for epoch in range(3):
    for chosen in torch.randperm(256, device=device).split(64):
        x, y = inputs[chosen], targets[chosen]
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
print(f"{len(losses)} steps, loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")
