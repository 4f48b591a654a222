"""What a style is: a training as people write it with hotloop, and beside it the same in plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# The training with hotloop, its twin, and what both leave behind: modules, optimizers, tensors, numbers.
Pair = tuple[Callable[[], object], Callable[[], object], Any]


@dataclass(frozen=True)
class Style:
    """A style. `build` is called once for each of the two, with the same seed."""

    name: str
    build: Callable[[], Pair]
    close: bool  # equal but for rounding, where sums are added in another order; else to the bit


STYLES: list[Style] = []


def style(build: Callable[[], Pair]) -> Callable[[], Pair]:
    """A style whose weights are those of its twin to the bit."""
    STYLES.append(Style(build.__name__, build, close=False))
    return build


def close_style(build: Callable[[], Pair]) -> Callable[[], Pair]:
    """One whose sums are added in another order than those of its twin."""
    STYLES.append(Style(build.__name__, build, close=True))
    return build


# What the twins share


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """What every tutorial does with a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# Small things to train


def pairs(rows: int = 20, size: int = 5, inputs: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Batches of numbers and of two classes."""
    x = torch.randn(rows, inputs)
    return list(zip(x.split(size), (x.sum(1) > 0).long().split(size), strict=True))


def numbers(rows: int = 20, size: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Batches of three numbers, and of one to predict."""
    x = torch.randn(rows, 3)
    return list(zip(x.split(size), x.sum(1, keepdim=True).sin().split(size), strict=True))


def loader(rows: int = 24, size: int = 8, **options: Any) -> DataLoader[Any]:
    """The same from a DataLoader, in an order that it draws."""
    x = torch.randn(rows, 3)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), size, shuffle=True, **options)


def mlp(inputs: int = 3, outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def sgd(*modules: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr, momentum=0.9)


def adamw(*modules: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr)
