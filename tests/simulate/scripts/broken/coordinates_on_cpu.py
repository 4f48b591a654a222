# why: linspace without a device gives CPU channels; torch.cat refuses them beside CUDA images.
# twin: unet_channels_last.py
# steps: 3
# expect: mixed-devices error at here

import torch
from torch import nn


def double(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU(), nn.Conv2d(cout, cout, 3, padding=1)
    )


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1 = double(5, width)
        self.down2 = double(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = double(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        b, _, h, w = x.shape
        rows = torch.linspace(-1, 1, h).view(1, 1, h, 1).expand(b, 1, h, w)
        columns = torch.linspace(-1, 1, w).view(1, 1, 1, w).expand(b, 1, h, w)
        a = self.down1(torch.cat([x, rows, columns], dim=1))  # <- here
        c = self.up(self.down2(self.pool(a)))
        return self.out(self.merge(torch.cat([a, c], dim=1)))


def dice(logits, masks, smooth=1.0):
    p = logits.sigmoid().flatten(1)
    m = masks.flatten(1)
    return 1 - ((2 * (p * m).sum(1) + smooth) / (p.sum(1) + m.sum(1) + smooth)).mean()


device = "cuda" if torch.cuda.is_available() else "cpu"
model = UNet().to(device, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    images = torch.rand(4, 3, 16, 16).to(device, memory_format=torch.channels_last)
    masks = (images.mean(1, keepdim=True) > 0.5).float()
    optimizer.zero_grad(set_to_none=True)
    loss = dice(model(images), masks)
    loss.backward()
    optimizer.step()
print("dice", 1 - loss.item())
