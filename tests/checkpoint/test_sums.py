"""The sums of a checkpoint come back equal, and nothing else passes for them."""

import hashlib
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.checkpoint.sums import Sum, Sums

FILES = {"tensors.safetensors": Sum(5, "ab"), "state.json": Sum(0, "cd")}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(
    st.integers(0, 10**18),
    st.integers(0),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.text(),
)
def test_sums_come_back_equal(step: int, number: int, score: float | None, goal: str | None) -> None:
    sums = Sums(step, number, score, FILES, goal)
    assert Sums.from_bytes(sums.to_bytes()) == sums


@given(st.data())
def test_whatever_is_in_them_is_sums_or_a_value_error(data: st.DataObject) -> None:
    about: dict[str, Any] = json.loads(Sums(1, 2, 0.5, FILES).to_bytes())
    del about["sha256"]
    field = data.draw(st.sampled_from([*about, "size"]))
    if field == "size":
        about["files"]["state.json"]["size"] = data.draw(JSON)
    else:
        about[field] = data.draw(JSON)
    own = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    with suppress(ValueError):
        sums = Sums.from_bytes(json.dumps({**about, "sha256": own}).encode())
        assert Sums.from_bytes(sums.to_bytes()) == sums


@given(st.binary(max_size=40) | JSON.map(lambda each: json.dumps(each).encode()))
def test_anything_else_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"sums\.json"):
        Sums.from_bytes(content)
