# why: Adagrad makes its sums when it is built, on the CPU; the parameters move, the sums stay, and step refuses the
#      mix.
# twin: optimizer_before_move.py
# steps: 4
# expect: mixed-devices or orphaned-parameters error at built or step

import torch
from torch import nn

model = nn.Sequential(nn.Embedding(30, 12), nn.Flatten(), nn.Linear(48, 30))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)  # <- built
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model.to(device)

before = model[2].weight.detach().clone()
for _ in range(4):
    words = torch.randint(30, (16, 4), device=device)
    loss = nn.functional.cross_entropy(model(words), words[:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <- step
print("moved by", (model[2].weight - before).abs().max().item())
