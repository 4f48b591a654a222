# style: stochastic weight averaging from torch.optim.swa_utils, batch norm updated at the end
# steps: 8
# expect: nothing

import torch
import torch.nn as nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(32, 6), torch.randn(32, 2))
loader = DataLoader(data, batch_size=8, shuffle=True)

model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).to(device)
swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
swa_start = 1

for epoch in range(2):
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    if epoch >= swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()

update_bn(loader, swa_model, device=device)
swa_model.eval()
with torch.no_grad():
    everything = torch.stack([x for x, _ in data]).to(device)
    print("mean output", swa_model(everything).mean().item())
