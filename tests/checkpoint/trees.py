"""Whether two trees are the same, to the type and the bit."""

import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor


def same(a: Any, b: Any) -> bool:
    """Equal in types, order and bits; tensors also in dtype and shape."""
    if isinstance(a, Tensor):
        if not (isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape):
            return False
        return raw(a) == raw(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, OrderedDict) and not same(getattr(a, "_metadata", None), getattr(b, "_metadata", None)):
        return False
    if isinstance(a, dict):
        return same(list(a), list(b)) and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, complex):
        return same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


def raw(tensor: Tensor) -> bytes:
    data = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
