"""The visitors of nested values agree on what has parts, and leave alone what nobody changes."""

from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from hotloop.values.tree import changeable_in, form_of, leaves, map_leaves, parts_of, path_to, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Sample:
    x: Any
    checked: bool = False

    def __post_init__(self) -> None:
        assert not self.checked, "made once, and then copied"
        self.checked = True


NESTED = st.recursive(
    st.integers(0, 9) | st.text("ab", max_size=2),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda each: deque(each, 5)),
        st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
        st.dictionaries(st.integers(0, 3), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(0, 3), inner, max_size=3).map(MappingProxyType),
        st.dictionaries(st.integers(0, 3), inner, max_size=3).map(UserDict),
        st.builds(Pair, inner, inner),
        st.builds(Sample, inner),
    ),
    max_leaves=8,
)


@given(NESTED)
def test_all_visitors_see_the_same_tree(value: Any) -> None:
    assert map_leaves(value, lambda leaf: leaf) is value
    marked = map_leaves(value, lambda leaf: ("leaf", leaf).__hash__())
    assert leaves(marked) == [("leaf", leaf).__hash__() for leaf in leaves(value)]
    assert form_of(marked, lambda leaf: None) == form_of(value, lambda leaf: None)
    assert getattr(marked, "maxlen", None) == getattr(value, "maxlen", None)


@given(NESTED)
def test_a_path_is_the_expression_that_reaches_a_part(value: Any) -> None:
    for key, part in parts_of(value):
        assert eval(path_to("value", value, key), {"value": value}) is part  # noqa: S307


def test_a_container_in_itself_has_an_end() -> None:
    endless: list[Any] = [torch.zeros(1), {"a": {}}]
    endless.append(endless)
    assert [path for path, _ in tensors_in(endless)] == ["batch[0]"]
    assert sum(part is endless for part in changeable_in(endless)) == 2  # and entered once


def test_words_are_not_entered_one_by_one() -> None:
    class Vocabulary(dict[str, int]):
        def items(self) -> Any:
            raise AssertionError

    assert len(list(changeable_in([Vocabulary(a=1)]))) == 2


def test_a_packed_sequence_is_one_leaf_with_its_data() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert leaves([packed]) == [packed]
    assert [path for path, _ in tensors_in([packed])] == ["batch[0].data"]
    assert any(part is packed.data for part in changeable_in(packed))
