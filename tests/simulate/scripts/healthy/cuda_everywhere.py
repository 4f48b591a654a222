# style: .cuda() everywhere, no other device thought of
# runs: cuda
# steps: 6
# expect: nothing

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
torch.backends.cudnn.benchmark = True

xs = torch.randn(48, 3, 16, 16)
ys = torch.randint(0, 4, (48,))
counts = torch.bincount(ys, minlength=4).float() + 1

net = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(256, 4),
).cuda()
criterion = nn.CrossEntropyLoss(weight=(counts.sum() / counts).cuda())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

for epoch in range(2):
    for i in range(0, 48, 16):
        x = xs[i : i + 16].cuda()
        y = ys[i : i + 16].cuda()
        loss = criterion(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    probabilities = F.softmax(net(xs.cuda()), dim=1).cpu()
print("right:", (probabilities.argmax(1) == ys).float().mean().item(), "on", torch.cuda.get_device_name())
