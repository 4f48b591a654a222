# why: the progress bar is given the loss in every step.
# twin: progress_bar.py
# steps: 8
# expect: sync item at step, times 8

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
    for x, y in bar:
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=loss.item())  # <- step
