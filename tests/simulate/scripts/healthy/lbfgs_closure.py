# style: LBFGS with a closure, double precision, one batch; the line search reads values
# steps: 3
# expect: nothing
# expect: sync item or bool at step

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
device = "cuda" if torch.cuda.is_available() else "cpu"

time = torch.linspace(0, 6, 40, device=device).repeat(4, 1)
wave = torch.sin(time + torch.arange(4, device=device).unsqueeze(1))
model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1)).to(device)
windows = wave.unfold(1, 6, 1).reshape(-1, 6)
inputs, targets = windows[:, :5], windows[:, 5:]
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


for step in range(3):
    loss = optimizer.step(closure)  # <- step
    print(step, loss.item())
