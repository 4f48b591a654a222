"""Make everything of this model move with it.

`mean` stays on the CPU when the model moves to the GPU. Repair the model
itself, so that `mean` moves with it, is saved in its state_dict, and is not
trained.
"""

import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.full((4,), 0.5))

    def forward(self, x):
        return self.layer(x - self.mean)


model = Scorer().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    x = torch.rand(8, 4, device=device)
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"mean is on {model.mean.device}")
