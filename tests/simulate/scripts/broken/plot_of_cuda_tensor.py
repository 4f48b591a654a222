# why: matplotlib calls np.asarray on what it is given, which raises TypeError for a CUDA tensor.
# twin: loss_plot.py
# runs: cpu, slowly
# steps: 5
# expect: numpy-of-cuda error at here

import tempfile
from pathlib import Path

import matplotlib
import torch
from torch import nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(3, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(50, 3, device=device)
y = x @ torch.tensor([[1.0], [2.0], [3.0]], device=device)

losses = []
for _ in range(5):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())

figure, axes = plt.subplots(figsize=(3, 2))
axes.plot(torch.stack(losses))  # <- here
axes.set_xlabel("step")
with tempfile.TemporaryDirectory() as folder:
    figure.savefig(Path(folder) / "loss.png")
print("drawn")
