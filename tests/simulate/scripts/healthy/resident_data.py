# style: the whole data set on the device, batches by index, a while loop
# steps: 6
# expect: nothing

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
images = torch.rand(60, 1, 10, 10)
labels = (images.mean((1, 2, 3)) * 20).long() % 3
images, labels = images.to(device), labels.to(device)

model = nn.Sequential(nn.Flatten(), nn.Linear(100, 30), nn.PReLU(), nn.Linear(30, 3)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

epoch, steps = 0, 0
order = torch.randperm(60, device=device)
at = 0
while steps < 6:
    if at >= 60:
        epoch, at, order = epoch + 1, 0, torch.randperm(60, device=device)
    chosen = order[at : at + 20]
    at += 20
    x = images[chosen]
    y = labels[chosen]
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
print("epochs", epoch + 1, "loss", loss.item())
