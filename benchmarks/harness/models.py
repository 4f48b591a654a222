"""The networks of the workloads, written as they are everywhere: a small CNN, ResNet-18 for small images, GPT."""

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> nn.Module:
    """16 numbers in, 64 neurons, one number out."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))


def small_cnn(classes: int = 10) -> nn.Module:
    """Three convolutions for images of 32x32 pixels.

    >>> sum(weight.numel() for weight in small_cnn().parameters())
    114186
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, 32, 64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, classes))


class ResNet18(nn.Module):
    """ResNet-18 as it is used for 32x32 pixels: a stem of 3x3, and no pooling before the first block."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            outputs = width << stage
            blocks += [_BasicBlock(inputs, outputs, 1 if stage == 0 else 2), _BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return scores


class _BasicBlock(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.short(x))


@dataclass(frozen=True)
class GPTSize:
    """How large a GPT is; as it stands, the one of 124 million parameters."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50_304  # GPT-2's 50,257, rounded up to what tensor cores like


class GPT(nn.Module):
    """Tokens (n, length) to scores (n, length, vocabulary); the head shares its weights with the embedding."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(_Layer(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.apply(_begin)
        for name, weight in self.named_parameters():
            if name.endswith("out.weight"):  # so that the sum over the layers begins no larger than one of them
                nn.init.normal_(weight, std=0.02 / (2 * size.layers) ** 0.5)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


class _Layer(nn.Module):
    """Attention to earlier tokens, then a network for each token alone."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.attend = _Attention(size)
        self.think = _Think(size.width)
        self.first = nn.LayerNorm(size.width, bias=False)
        self.second = nn.LayerNorm(size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x))
        result: Tensor = x + self.think(self.second(x))
        return result


class _Attention(nn.Module):
    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.all = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        query, key, value = (
            part.view(count, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.all(x).split(width, 2)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(seen.transpose(1, 2).reshape(count, length, width))
        return result


class _Think(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(F.gelu(self.into(x)))
        return result


def _begin(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
