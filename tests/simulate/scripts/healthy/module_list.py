# style: layers in a ModuleList, learning rates per parameter group
# steps: 4
# expect: nothing

import torch
import torch.nn as nn


class DeepSet(nn.Module):
    """Sums over a set after a few layers of each element."""

    def __init__(self, width=16, depth=3):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.last = nn.Linear(width, 2)

    def forward(self, points):
        h = torch.relu(self.first(points))
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return self.last(h.sum(1))


device = "cuda:0" if torch.cuda.is_available() else "cpu"
net = DeepSet().to(device)
groups = [{"params": net.last.parameters(), "lr": 0.01}]
groups += [{"params": [p for n, p in net.named_parameters() if not n.startswith("last")]}]
optimizer = torch.optim.Adam(groups, lr=0.001)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

cloud = torch.randn(40, 7, 3)
label = (cloud.norm(dim=2).mean(1) > 1.55).long()
for start in range(0, 40, 10):
    points, y = cloud[start : start + 10].to(device), label[start : start + 10].to(device)
    loss = nn.CrossEntropyLoss()(net(points), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
print("rates", [group["lr"] for group in optimizer.param_groups])
