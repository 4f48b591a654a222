"""A UNet for segmentation: down to a sixteenth, up again, with the skips concatenated."""

import torch
from torch import Tensor, nn


class Double(nn.Sequential):
    """Twice a convolution, normalisation and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, classes: int = 2, width: int = 64) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.first = Double(3, width)
        self.down = nn.ModuleList(Double(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in reversed(widths[:-1]))
        self.up = nn.ModuleList(Double(2 * a, a) for a in reversed(widths[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for down in self.down:
            skips.append(down(self.pool(skips[-1])))
        x = skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)
