# style: torch.set_default_device, so that nothing names a device again
# steps: 8
# expect: nothing

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)

dataset = TensorDataset(torch.randn(32, 10), torch.randn(32, 1))
generator = torch.Generator(device=device)
loader = DataLoader(dataset, batch_size=8, shuffle=True, generator=generator)

model = nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
running = torch.zeros(1)


def epoch():
    for x, y in loader:
        loss = nn.functional.huber_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running.add_(loss.detach())


epoch()
epoch()
print("mean loss", (running / 8).item())
