# why: the new head is made after the model was moved, so it is on the CPU and its linear layer refuses CUDA features.
# twin: freeze_unfreeze.py
# steps: 6
# expect: mixed-devices error at here

import torch
from torch import nn


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 100)

    def forward(self, x):
        x = torch.relu(self.bn(self.stem(x))).mean((2, 3))
        return self.fc(x)  # <- here


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Backbone().to(device)
for p in model.parameters():
    p.requires_grad = False
model.fc = nn.Linear(8, 5)

criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.01)


def run(steps):
    for _ in range(steps):
        x = torch.rand(6, 3, 12, 12, device=device)
        y = torch.randint(5, (6,), device=device)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


run(3)
backbone = list(model.stem.parameters()) + list(model.bn.parameters())
for p in backbone:
    p.requires_grad = True
optimizer.add_param_group({"params": backbone, "lr": 1e-3})
run(3)
print("groups:", [len(group["params"]) for group in optimizer.param_groups])
