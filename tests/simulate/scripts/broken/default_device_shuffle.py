# why: the sampler's own generator lives on the CPU, and randperm on the default device CUDA refuses it (RuntimeError:
#      Expected a 'cuda' device type for generator but found 'cpu').
# twin: default_device.py
# steps: 8
# expect: generator-device or mixed-devices error at here

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)

dataset = TensorDataset(torch.randn(32, 10), torch.randn(32, 1))
loader = DataLoader(dataset, batch_size=8, shuffle=True)

model = nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
running = torch.zeros(1)


def epoch():
    for x, y in loader:  # <- here
        loss = nn.functional.huber_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running.add_(loss.detach())


epoch()
epoch()
print("mean loss", (running / 8).item())
