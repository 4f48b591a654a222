"""Nested values as plain data and tensors, and back: what a checkpoint can hold without pickle."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

_MANY = 16  # numbers from which a tensor takes less room than a list
_LARGEST = 2**63


class NotPlain(Exception):
    """A value that is more than numbers, words, arrays and what is nested from them."""


def plain(value: Any) -> Any:
    """A value as None, numbers, words, lists, dicts with words as keys, and tensors.

    >>> plain((1, "a"))
    {'~tuple': [1, 'a']}
    """
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if -_LARGEST <= value < _LARGEST else {"~int": str(value)}
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, bytes | bytearray):
        return {"~bytes": torch.tensor(list(value), dtype=torch.uint8)}
    if isinstance(value, dict):
        return _dict(value)
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, tuple):
        return {"~numbers": torch.tensor(value)} if _is_many_numbers(value) else {"~tuple": [plain(v) for v in value]}
    raise NotPlain(f"a {type(value).__name__}")


def from_plain(value: Any) -> Any:
    """The value that `plain` was given.

    >>> from_plain({'~tuple': [1, 'a']})
    (1, 'a')
    """
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    if isinstance(value, Tensor):
        return value.cpu()
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("~"):
        return {key: from_plain(each) for key, each in value.items()}
    held = value[tag]
    if tag == "~tuple":
        return tuple(from_plain(each) for each in held)
    if tag == "~numbers":
        return tuple(held.tolist())
    if tag == "~int":
        return int(held)
    if tag == "~bytes":
        return bytes(held.tolist())
    if tag == "~array":
        return held.cpu().numpy().astype(value["type"], casting="unsafe")
    if tag == "~dict":
        return {from_plain(key): from_plain(each) for key, each in held}
    raise NotPlain(f"an unknown kind of value, {tag!r}")


def _array(value: np.ndarray[Any, Any]) -> dict[str, Any]:
    if value.dtype.kind not in "biuf":
        raise NotPlain(f"an array of {value.dtype}")
    # Unsigned numbers travel as signed ones of the same bits: not every format of tensors has them.
    wide = np.float64 if value.dtype.kind == "f" else np.int64
    return {"~array": torch.from_numpy(value.astype(wide)), "type": str(value.dtype)}


def _dict(value: dict[Any, Any]) -> dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("~") for key in value):
        return {key: plain(each) for key, each in value.items()}
    return {"~dict": [[plain(key), plain(each)] for key, each in value.items()]}


def _is_many_numbers(value: tuple[Any, ...]) -> bool:
    return len(value) >= _MANY and all(type(each) is int and -_LARGEST <= each < _LARGEST for each in value)
