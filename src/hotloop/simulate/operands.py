"""The tensors among the arguments and results of an operation."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Every tensor, also in lists of them, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


def replaced(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A value with others in place of its tensors."""
    if isinstance(value, Tensor):
        return change(value)
    return [replaced(item, change) for item in value] if isinstance(value, list | tuple) else value


def holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(holds_tensor, value)))


def is_host(value: Any) -> bool:
    """Whether a value is a tensor with data."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
