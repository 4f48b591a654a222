"""Helpers of dispatch modes: the name of an operation, its arguments, small host tensors."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FEW_NUMBERS = 16  # numbers in a tensor that are taken to be a part of the code; more of them are data


@lru_cache(maxsize=4096)
def name_of(func: Callable[..., Any]) -> str:
    """The name of an operation, such as "aten.add.Tensor"; cached, since it is needed at every call."""
    return str(func)


def values_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of an operation, with lists flattened, such as the tensors of `torch.cat`."""
    return [
        each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, list | tuple) else (value,))
    ]


def is_few(tensor: Tensor) -> bool:
    """Whether a tensor is on the host and has at most `FEW_NUMBERS` elements."""
    return tensor.is_cpu and tensor.layout == torch.strided and tensor.numel() <= FEW_NUMBERS
