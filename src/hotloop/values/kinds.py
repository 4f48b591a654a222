"""The kinds of Python values: one table for whatever walks, compares, restores or saves them.

A word is a value that nothing changes in place. Plain are words, arrays and tensors of values alone, and lists, tuples,
deques, sets, dicts and bytearrays of them: what can be compared, restored and saved. A nested value has parts.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import is_dataclass
from types import NoneType

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

NUMBERS = (bool, int, float, complex)
WORD_TYPES = (NoneType, *NUMBERS, str, bytes, torch.Size, torch.dtype, torch.device)
WORD_KINDS = frozenset(WORD_TYPES)
KEYS = (NoneType, bool, int, float, str, bytes)  # of dicts and sets, and tuples of them
SEQUENCES = (list, tuple, deque)
SETS = (set, frozenset)
DICTS = (dict, OrderedDict, defaultdict, Counter)
FILLABLE = (list, dict, set, deque, bytearray, MutableMapping)  # to which something can be added
ARRAYS = "biufcSUmM"  # kinds of NumPy values that are only bytes
ROOM = 64 << 20  # bytes of the arrays in a value: more are data


class Kinds(dict[type, bool]):
    """Whether a type is of a kind; asked once of each type, since values are asked by the thousand."""

    def __init__(self, is_one: Callable[[type], bool]) -> None:
        self._is_one = is_one

    def __missing__(self, kind: type) -> bool:
        found = self[kind] = self._is_one(kind)
        return found


def _has_parts(kind: type) -> bool:
    if issubclass(kind, torch.Size | PackedSequence):
        return False
    return issubclass(kind, (*SEQUENCES, Mapping)) or is_dataclass(kind)


NESTED = Kinds(_has_parts)
CONTAINERS = Kinds(lambda kind: issubclass(kind, FILLABLE))
HELD = Kinds(lambda kind: issubclass(kind, (*WORD_TYPES, np.generic, tuple, frozenset, *FILLABLE)))


def is_restored(value: object) -> bool:
    """Whether a snapshot restores an attribute or a part of a batch: anything plain, and containers of anything else.

    What is in a container and not plain is held, and not copied.
    """
    kind = type(value)
    return HELD[kind] or (kind is Tensor and has_values(value)) or is_plain_array(value)


def is_plain_number(value: object) -> bool:
    """Whether it is a number or a word of NumPy's."""
    return isinstance(value, np.generic) and value.dtype.kind in ARRAYS


def is_plain_array(value: object) -> bool:
    """Whether it is an array of bytes alone, and not of objects or records, nor a whole dataset."""
    return type(value) is np.ndarray and value.dtype.kind in ARRAYS and value.nbytes <= ROOM


def has_values(value: object) -> bool:
    """Whether it is a tensor whose values can be copied: neither sparse, on `meta`, nor lazy."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or is_lazy(value))


def is_plain_tensor(value: object) -> bool:
    """A tensor of values alone; one that remembers what it was computed from is a result that somebody looks at."""
    return type(value) is Tensor and value.grad_fn is None and has_values(value) and not value.is_quantized
