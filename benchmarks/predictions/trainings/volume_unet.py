"""A U-Net that segments volumes of 64x64x64 voxels, each normalised by itself: fp32, Adam, a Dice loss beside the usual."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
classes = 4


def double(inputs, outputs):
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1),
        nn.InstanceNorm3d(outputs, affine=True),
        nn.LeakyReLU(0.01, inplace=True),
        nn.Conv3d(outputs, outputs, 3, padding=1),
        nn.InstanceNorm3d(outputs, affine=True),
        nn.LeakyReLU(0.01, inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, channels=2, widths=(32, 64, 128, 256)):
        super().__init__()
        self.down = nn.ModuleList(double(a, b) for a, b in zip((channels, *widths), widths, strict=False))
        self.pool = nn.MaxPool3d(2)
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose3d(deep, high, 2, stride=2) for deep, high in pairs)
        self.up = nn.ModuleList(double(2 * high, high) for _, high in pairs)
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x):
        skips = []
        for number, down in enumerate(self.down):
            x = down(self.pool(x) if number else x)
            skips.append(x)
        skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), skips.pop()], dim=1))
        return self.head(x)


def dice_loss(scores, target):
    guess = F.softmax(scores, dim=1)
    truth = F.one_hot(target, classes).movedim(-1, 1).float()
    both, all_of_them = (guess * truth).sum((2, 3, 4)), (guess + truth).sum((2, 3, 4))
    return 1 - ((2 * both + 1e-5) / (all_of_them + 1e-5)).mean()


model = UNet().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=1e-5)
volumes = torch.randn(args.batch, 2, 64, 64, 64)
masks = torch.randint(0, classes, (args.batch, 64, 64, 64))

for step in range(args.steps):
    x, y = volumes.to(device), masks.to(device)
    optimizer.zero_grad()
    scores = model(x)
    loss = F.cross_entropy(scores, y) + dice_loss(scores, y)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
