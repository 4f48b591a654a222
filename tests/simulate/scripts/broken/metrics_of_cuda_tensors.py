# why: numpy() and np.mean of a list both end in Tensor.__array__, which raises TypeError for CUDA tensors.
# twin: metrics_numpy.py
# steps: 6
# expect: numpy-of-cuda error at predictions, fix .cpu()
# expect: numpy-of-cuda error at mean

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4
device = "cuda" if torch.cuda.is_available() else "cpu"


def confusion(truth, guess):
    table = np.zeros((CLASSES, CLASSES), dtype=int)
    np.add.at(table, (truth, guess), 1)
    return table


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    guesses, truths = [], []
    for x, y in loader:
        guesses.append(model(x.to(device)).argmax(1))
        truths.append(y)
    guesses = torch.cat(guesses).numpy()  # <- predictions
    model.train()
    return confusion(torch.cat(truths).numpy(), guesses)


x = torch.randn(60, 8)
data = TensorDataset(x, x[:, :CLASSES].argmax(1))
train, test = DataLoader(data, batch_size=20, shuffle=True), DataLoader(data, batch_size=30)
model = nn.Linear(8, CLASSES).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

for epoch in range(2):
    losses = []
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = np.mean(losses)  # <- mean
    table = evaluate(model, test)
    print(f"epoch {epoch}: loss {mean:.3f}, accuracy {np.trace(table) / table.sum():.2f}")
