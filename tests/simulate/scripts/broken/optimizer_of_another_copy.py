# why: the optimizer holds the parameters of the model before the copy, so it never trains the one on the GPU; no
#      error is raised.
# twin: optimizer_before_move.py
# steps: 4
# expect: orphaned-parameters error or warning at built or step

import copy

import torch
from torch import nn

model = nn.Sequential(nn.Embedding(30, 12), nn.Flatten(), nn.Linear(48, 30))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # <- built
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = copy.deepcopy(model).to(device)

before = model[2].weight.detach().clone()
for _ in range(4):
    words = torch.randint(30, (16, 4), device=device)
    loss = nn.functional.cross_entropy(model(words), words[:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <- step
print("moved by", (model[2].weight - before).abs().max().item())
