"""What a loader tells of itself goes into a position if every checkpoint can hold it."""

from collections import OrderedDict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.checkpoint.codec import pack
from hotloop.data import Stream


class Telling(list[float]):
    """A loader that tells something of itself."""

    state_dict: Any
    load_state_dict = list.clear


def kept(tells: Any) -> Any:
    loader = Telling([1.0, 2.0])
    loader.state_dict = lambda: tells
    batches: Stream[Any] = Stream(loader, "cpu")
    next(iter(batches))
    state = batches.position(1).state_dict()
    pack(state)
    return state["loader"]


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
PLAIN: list[Any] = [
    {"at": 3, "done": False, "name": None, "seed": 2**70, "z": 1j, 7: [0.5, (b"a", "b")]},
    [torch.ones(2, 3).t(), np.arange(3, dtype=np.uint64), np.float32(2), np.int64(2), np.bool_(1)],
    np.random.default_rng(3).bit_generator.state,
]
MORE: list[Any] = [
    object(), len, ITSELF, namedtuple("pair", "x y")(1, 2), IntEnum("kind", "a b").a,
    torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.nn.Parameter(torch.ones(2)), np.array([object()]),
]  # fmt: skip
LEAVES = st.sampled_from([*PLAIN, *MORE, "\ud800", bytearray(2), {1}, torch.float32, OrderedDict(a=1), np.array(["a"])])
KEYS = st.sampled_from(["a", "$tensor", "\ud800", 1, 2.5, None, b"a", (1, 2), np.int64(3), torch.float32])


@pytest.mark.parametrize("tells", PLAIN, ids=["words", "tensors and arrays", "a rng state"])
def test_plain_data_is_kept(tells: Any) -> None:
    assert kept(tells) is tells


@pytest.mark.parametrize("tells", MORE, ids=lambda tells: type(tells).__name__)
def test_what_is_more_is_left_out(tells: Any) -> None:
    """Then the loader is read again up to where it was."""
    assert kept(tells) is kept({"in": [(tells,)]}) is None


@settings(deadline=None)
@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)))
def test_whatever_a_loader_tells_a_checkpoint_can_hold_the_position(tells: Any) -> None:
    held = kept(tells)
    assert held is None or held is tells
