"""What a dispatch mode sees of an operation: its name, the values that it is called with, small tensors of the host."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FEW = 16  # numbers in a tensor that are taken to be a part of the code; more of them are data


@lru_cache(maxsize=4096)
def name_of(func: Callable[..., Any]) -> str:
    """That of an operation, such as "aten.add.Tensor"; asked for each time that it comes."""
    return str(func)


def values_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operation is called with; of a list, such as the tensors of `torch.cat`, what is in it."""
    return [
        each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, list | tuple) else (value,))
    ]


def is_few(tensor: Tensor) -> bool:
    """Whether a tensor lies on the host and has so few numbers that they can be looked at."""
    return tensor.is_cpu and tensor.layout == torch.strided and tensor.numel() <= FEW
