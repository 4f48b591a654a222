# why: DataParallel scatters its inputs by itself, which hides that the labels were never moved.
# twin: data_parallel.py
# steps: 4
# expect: mixed-devices error at here

import torch
import torch.nn as nn
import torch.optim as optim


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())

    def forward(self, x):
        return x + self.body(x)


def build(width=24, depth=2):
    return nn.Sequential(*[Block(width) for _ in range(depth)], nn.Linear(width, 5))


model = build()
if torch.cuda.is_available():
    model = model.cuda()
model = nn.DataParallel(model)
device = next(model.parameters()).device
opt = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
print(sum(p.numel() for p in model.module.parameters()), "parameters on", device)

for _ in range(4):
    images = torch.randn(12, 24)
    labels = torch.randint(5, (12,))
    opt.zero_grad()
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)(model(images), labels)  # <- here
    loss.backward()
    opt.step()

state = {name: value.cpu() for name, value in model.module.state_dict().items()}
print(len(state), "tensors kept")
