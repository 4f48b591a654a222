"""Nested values go through plain data and come back as they were."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotloop.data.plain import NotPlain, from_plain, plain

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary()
KEYS = st.text(max_size=5) | st.integers() | st.sampled_from(["~tuple", "~x", "type"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(st.integers(), min_size=15, max_size=18).map(tuple)
    ),
)


def without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: without_tensors(each) for key, each in value.items()}
    return [without_tensors(each) for each in value] if isinstance(value, list) else value


@given(VALUES)
def test_there_and_back(value: Any) -> None:
    there = plain(value)
    bare = without_tensors(there)
    assert json.loads(json.dumps(bare)) == bare
    assert from_plain(there) == value


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int8, np.bool_, np.float32, np.float64])
def test_arrays(dtype: Any) -> None:
    array = np.array([0, 1, 2**31, 2**63 - 1]).astype(dtype)
    back = from_plain(plain({"a": array}))["a"]
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64"])
def test_the_states_of_numpy(kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(7))
    state = from_plain(plain(generator.bit_generator.state))
    expected = generator.random(3).tolist()
    generator.bit_generator.state = state
    assert generator.random(3).tolist() == expected


def test_the_state_of_python() -> None:
    random.gauss(0, 1)
    state = random.getstate()
    assert from_plain(plain(state)) == state


@pytest.mark.parametrize("value", [object(), {1, 2}, [lambda: None], np.array(["a"])])
def test_what_is_more_than_that(value: Any) -> None:
    with pytest.raises(NotPlain):
        plain(value)


def test_tensors_are_copied() -> None:
    tensor = torch.zeros(2)
    held = plain([tensor])
    tensor.add_(1)
    assert held[0].tolist() == [0, 0]
