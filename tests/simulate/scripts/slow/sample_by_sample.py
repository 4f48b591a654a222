# why: each sample is compared alone and read back alone: a wait per sample.
# twin: numpy_minibatches.py
# steps: 8
# expect: sync item or int or bool at each, times 64

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
        logits = model(x)
        right = 0
        for guess, truth in zip(logits.argmax(1), y):
            right += int(guess == truth)  # <- each
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print(epoch, np.mean(torch.stack(losses).cpu().numpy()))
