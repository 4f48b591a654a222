# why: the series is made on the CPU and only the inputs are moved; mse_loss in the closure refuses the targets.
# twin: lbfgs_closure.py
# steps: 3
# expect: mixed-devices error at here, fix targets = targets.to(
# expect: sync item or bool at step

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
device = "cuda" if torch.cuda.is_available() else "cpu"

time = torch.linspace(0, 6, 40).repeat(4, 1)
wave = torch.sin(time + torch.arange(4).unsqueeze(1))
model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1)).to(device)
windows = wave.unfold(1, 6, 1).reshape(-1, 6)
inputs, targets = windows[:, :5].to(device), windows[:, 5:]
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)  # <- here
    loss.backward()
    return loss


for step in range(3):
    loss = optimizer.step(closure)  # <- step
    print(step, loss.item())
