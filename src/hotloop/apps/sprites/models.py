"""The two networks: one that sorts sprites, and one that draws them as palette indices, so they are always crisp."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotloop.apps.sprites.dataset import COLOURS, SIDE
from hotloop.records import Record

TOKENS = COLOURS + 1  # transparent and the colours
MASK = TOKENS  # a pixel that is not drawn yet
WIDEST = 512  # networks: a drawer of this width has 500 million weights


@dataclass(frozen=True)
class Size(Record):
    """How large a network is."""

    classes: int
    width: int


class Classifier(nn.Module):
    """Sprites (n, 16, 16) to scores (n, classes): three stages of convolutions, each half as fine as the last."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        w = size.width
        self.embed = nn.Embedding(TOKENS, w)
        self.stages = nn.Sequential(
            _stage(w, w),
            nn.MaxPool2d(2),
            _stage(w, 2 * w),
            nn.MaxPool2d(2),
            _stage(2 * w, 4 * w),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(4 * w, size.classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.stages(self.embed(pixels.int()).permute(0, 3, 1, 2))
        scores: Tensor = self.head(features.flatten(1))
        return scores


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in ((inputs, outputs), (outputs, outputs)):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b, momentum=0.2), nn.ReLU()]
    return nn.Sequential(*layers)


class Drawer(nn.Module):
    """Half-drawn sprites and the class to draw, to scores for every pixel: (n, 17, 16, 16).

    A pixel that is not drawn yet is `MASK`; the class `size.classes` means "any". The network has the shape of a U:
    whole shapes are decided where the picture is 4 pixels wide, edges where it is 16.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        w = size.width
        self.embed = nn.Embedding(TOKENS + 1, w)
        self.place = nn.Parameter(torch.zeros(1, w, SIDE, SIDE))
        self.kind = nn.Embedding(size.classes + 1, 4 * w)
        self.down = nn.ModuleList([_Block(w, w, 4 * w), _Block(w, 2 * w, 4 * w), _Block(2 * w, 4 * w, 4 * w)])
        self.middle = nn.ModuleList([_Block(4 * w, 4 * w, 4 * w), _Block(4 * w, 4 * w, 4 * w)])
        self.up = nn.ModuleList([_Block(6 * w, 2 * w, 4 * w), _Block(3 * w, w, 4 * w), _Block(w, w, 4 * w)])
        self.head = nn.Sequential(nn.GroupNorm(1, w), nn.SiLU(), nn.Conv2d(w, TOKENS, 1))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        kind = self.kind(labels)
        fine = self.down[0](self.embed(pixels.int()).permute(0, 3, 1, 2) + self.place, kind)
        half = self.down[1](nn.functional.max_pool2d(fine, 2), kind)
        coarse = self.down[2](nn.functional.max_pool2d(half, 2), kind)
        for block in self.middle:
            coarse = block(coarse, kind)
        half = self.up[0](torch.cat([_double(coarse), half], 1), kind)
        fine = self.up[2](self.up[1](torch.cat([_double(half), fine], 1), kind), kind)
        scores: Tensor = self.head(fine)
        return scores


class _Block(nn.Module):
    """Two convolutions beside a short cut; the class scales and shifts what lies between them."""

    def __init__(self, inputs: int, outputs: int, kind: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(1, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.told = nn.Linear(kind, 2 * outputs)
        self.norm = nn.GroupNorm(1, outputs)
        self.second = nn.Sequential(nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        nn.init.zeros_(self.second[1].weight)  # type: ignore[arg-type]  # a block begins as its short cut

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        scale, shift = self.told(kind)[:, :, None, None].chunk(2, 1)
        result: Tensor = self.short(x) + self.second(self.norm(self.first(x)) * (1 + scale) + shift)
        return result


def _double(x: Tensor) -> Tensor:
    return nn.functional.interpolate(x, scale_factor=2, mode="nearest")
