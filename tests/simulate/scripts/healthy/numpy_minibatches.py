# style: NumPy arrays cut into mini-batches by hand, no DataLoader
# steps: 8
# expect: nothing
# expect: no sync at loss

import numpy as np
import torch
import torch.nn.functional as F

np.random.seed(0)
X = np.random.rand(64, 9)
Y = (X.sum(axis=1) > 4.5).astype(np.int64)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = torch.nn.Sequential(torch.nn.Linear(9, 18), torch.nn.ELU(), torch.nn.Linear(18, 2))
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
batch_size = 16

for epoch in range(2):
    order = np.random.permutation(len(X))
    losses = []
    for start in range(0, len(X), batch_size):
        rows = order[start : start + batch_size]
        x = torch.as_tensor(X[rows], dtype=torch.float32, device=device)
        y = torch.as_tensor(Y[rows], device=device)
        loss = F.cross_entropy(model(x), y)  # <- loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print(epoch, np.mean(torch.stack(losses).cpu().numpy()))
