"""Plain values: taken apart and put together, compared, restored in place."""

import collections
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hotloop.checkpoint.codec import pack, unpack
from hotloop.values.attributes import LOST, Restoring, ValueSnapshot, devices_of, moved, plain
from hotloop.values.reach import look
from hotloop.values.snapshot import PassSnapshot
from hotloop.values.tree import changeable_in

WORDS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5), st.just(1 << 70),
    st.complex_numbers(), st.binary(max_size=5).map(bytearray),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2])]),
)  # fmt: skip
KEYS = st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.tuples(st.integers(), st.text(max_size=2)))
LEAVES = st.one_of(
    WORDS,
    st.integers(0, 4).map(lambda n: torch.arange(n, dtype=torch.float32)),
    st.integers(0, 4).map(np.arange),
    st.floats(width=32).map(np.float32),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda each: deque(each, 5)),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.sets(KEYS, max_size=3),
        st.frozensets(KEYS, max_size=3),
    ),
    max_leaves=8,
)


def shown(value: Any) -> str:
    """A value as text, to the type and the bit."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value)} {value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        return f"{type(value)} {[(repr(key), shown(each)) for key, each in value.items()]}"
    if isinstance(value, list | tuple | deque):
        return f"{type(value)} {[shown(each) for each in value]}"
    return f"{type(value)} {sorted(value, key=repr) if isinstance(value, set | frozenset) else value!r}"


@given(VALUES)
def test_a_plain_value_is_the_same_after_it_was_taken_apart_saved_and_read(value: Any) -> None:
    found = plain(value)
    assert shown(found.whole()) == shown(value)
    tensors, data = pack(found.whole())
    assert shown(unpack(tensors, data)) == shown(value)
    assert shown(moved(value, itertools.repeat(torch.device("cpu")))) == shown(value)
    assert set(devices_of(value)) <= {"cpu"}


def change(part: Any) -> None:
    """Change a container, a tensor or an array in place."""
    if isinstance(part, dict):
        part["a new key"] = 7
    elif isinstance(part, set):
        part.add("a new entry")
    elif isinstance(part, Tensor | np.ndarray):
        part += 1
    else:
        part.append(7)


@given(VALUES, st.randoms())
def test_what_is_compared_is_restored_and_saved(value: Any, choice: random.Random) -> None:
    """Whichever part of an attribute a pass changes: it is seen, restored, and the same in a checkpoint."""
    module = nn.Module()
    module.held, was = value, shown(value)
    tensors, data = pack(plain(value).whole())
    mark, seen = ValueSnapshot(plain(value)), look({"value": module}, fully=True)
    snapshot = PassSnapshot([module], torch.device("cpu"))
    snapshot.take()
    parts = [part for part in changeable_in(value) if not isinstance(part, Tensor | np.ndarray) or len(part)]
    if parts:
        change(choice.choice(parts))
    else:
        module.held = "another"
    assert not mark.fits(plain(module.held))
    assert seen.changes(look({"value": module}, fully=True)) == ["value.held"]
    snapshot.restore()
    assert module.held is value
    assert mark.fits(plain(value)) or devices_of(value), "of tensors it is compared how often they were written"
    assert shown(value) == shown(unpack(tensors, data)) == was


@given(VALUES, VALUES)
def test_a_mark_fits_its_value_and_no_other(value: Any, other: Any) -> None:
    mark = ValueSnapshot(plain(value))
    assert mark.fits(plain(value))
    if shown(value) != shown(other):
        assert not mark.fits(plain(other))
    was = mark.value
    assert was is not LOST
    assert shown(was) == shown(value)


@given(st.lists(VALUES, min_size=2, max_size=2))
def test_what_is_restored_has_the_value(values: list[Any]) -> None:
    now, was = values
    table = {"a": now}
    Restoring().put(table, "a", was)
    kinds = {type(now), type(was)}
    if kinds <= {dict, OrderedDict} or kinds == {deque, list}:  # the container stays of the kind that the script has
        assert list(table["a"]) == list(was) or shown(list(table["a"])) == shown(list(was))
    else:
        assert shown(table["a"]) == shown(was)


CHANGES: dict[str, Any] = {
    "list": ([1, 2], lambda v: v.append(3)),
    "nested": ({"a": [1]}, lambda v: v["a"].append(2)),
    "deque": (deque([1], 3), lambda v: v.append(2)),
    "set": ({1}, lambda v: v.add(2)),
    "counter": (Counter("a"), lambda v: v.update("b")),
    "tensor in a list": ([torch.zeros(2)], lambda v: v[0].add_(1)),
    "array": (np.zeros(3), lambda v: v.__iadd__(1)),
    "array in a dict": ({"a": np.zeros(3)}, lambda v: v["a"].fill(2)),
    "order of a dict": ({"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "True for 1": ([1], lambda v: v.__setitem__(0, True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen(name: str) -> None:
    value, change = CHANGES[name]
    mark = ValueSnapshot(plain(value))
    change(value)
    assert not mark.fits(plain(value))


@pytest.mark.parametrize(
    "value",
    [
        object(),
        [object()],
        {"a": lambda: 0},
        nn.Linear(1, 1),
        nn.Parameter(torch.zeros(1)),
        [nn.Parameter(torch.zeros(1))],
        {object(): 1},
        torch.zeros(2, requires_grad=True) * 2,
        [torch.zeros(1, requires_grad=True)],
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        np.array([object()]),
        list(range(200_000)),
        [torch.zeros(1 << 25)],
        collections.UserDict(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain(value: Any) -> None:
    assert plain(value) is None


def test_other_references_stay_valid() -> None:
    entries: list[int] = [1]
    groups: defaultdict[str, list[int]] = defaultdict(list, a=[1])
    table: dict[str, Any] = {"one": entries, "two": entries, "groups": groups}
    restoring = Restoring()
    restoring.put(table, "one", [5, 6])
    restoring.put(table, "two", [5, 6])
    restoring.put(table, "groups", {"b": [2]})
    assert table["one"] is table["two"] is entries
    assert entries == [5, 6]
    assert table["groups"] is groups
    assert groups["missing"] == []
