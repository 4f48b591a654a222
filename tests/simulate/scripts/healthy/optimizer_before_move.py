# style: the optimizer is built before model.to: the parameters stay the same objects, so it works
# steps: 4
# expect: nothing

import torch
from torch import nn

model = nn.Sequential(nn.Embedding(30, 12), nn.Flatten(), nn.Linear(48, 30))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model.to(device)

before = model[2].weight.detach().clone()
for _ in range(4):
    words = torch.randint(30, (16, 4), device=device)
    loss = nn.functional.cross_entropy(model(words), words[:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("moved by", (model[2].weight - before).abs().max().item())
