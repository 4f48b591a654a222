# style: tqdm with the loss beside the bar, refreshed once in a while
# steps: 8
# expect: nothing
# expect: no sync at step

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

device = "cuda" if torch.cuda.is_available() else "cpu"
loader = DataLoader(TensorDataset(torch.randn(64, 5), torch.randn(64)), batch_size=16)
model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1), nn.Flatten(0)).to(device)
optimizer = torch.optim.Rprop(model.parameters())

for epoch in range(2):
    bar = tqdm(loader, desc=f"epoch {epoch}", disable=None)
    for i, (x, y) in enumerate(bar):
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- step
        if i == len(loader) - 1:
            bar.set_postfix(loss=loss.item())
