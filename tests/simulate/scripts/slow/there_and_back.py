# why: the images go to the device, back to the CPU to be normalised, and to the device again.
# twin: resnet_early_stopping.py
# steps: 6
# expect: copy to the device at first, times 3
# expect: copy to the host at back, blocking, times 3
# expect: copy to the device at again, times 3

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MEAN = torch.tensor([0.48, 0.45, 0.41]).view(1, 3, 1, 1)
STD = torch.tensor([0.23, 0.22, 0.22]).view(1, 3, 1, 1)


class Residual(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride) if stride != 1 or cin != cout else nn.Identity()

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.skip(x))


model = nn.Sequential(Residual(3, 8), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)).to(
    device
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss()
train, val = random_split(TensorDataset(torch.rand(32, 3, 12, 12), torch.randint(4, (32,))), [24, 8])
best, patience, bad = float("inf"), 3, 0

for epoch in range(2):
    model.train()
    for x, y in DataLoader(train, 8, shuffle=True):
        x = x.to(device)  # <- first
        x = (x.cpu() - MEAN) / STD  # <- back
        x = x.to(device)  # <- again
        optimizer.zero_grad()
        criterion(model(x), y.to(device)).backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        losses = []
        for x, y in DataLoader(val, 8):
            x = ((x - MEAN) / STD).to(device)
            losses.append(criterion(model(x), y.to(device)))
    val_loss = torch.stack(losses).mean().item()
    bad = 0 if val_loss < best else bad + 1
    best = min(best, val_loss)
    if bad >= patience:
        print("stopping early")
        break
print("best", best)
