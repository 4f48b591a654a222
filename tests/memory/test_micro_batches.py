"""Batches in pieces: nothing is lost, nothing comes twice, and what belongs to no item goes with every piece."""

import types
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from hotloop.errors import BadArgument
from hotloop.memory.micro_batches import bounds, count_items, micro_batches_of, rows_of
from hotloop.objective.objectives import items_in

Pair = namedtuple("Pair", "image, label")


@dataclass(frozen=True)
class Record:
    x: Tensor
    names: list[str]
    scale: float = 2.0


class Encoding(UserDict):
    """As Hugging Face has them: a dict with a `.to`."""

    def to(self, device: Any) -> "Encoding":
        return self


def leaves(items: int) -> st.SearchStrategy[Any]:
    """Parts of a batch that have something for each item."""
    rows = torch.arange(items)
    return st.sampled_from(
        [
            rows,
            rows[:, None].expand(items, 3).contiguous(),
            rows.float(),
            [f"item {i}" for i in range(items)],
            tuple(range(items)),
            rows.numpy(),
            rows.to_sparse() if items else rows,
        ]
    )


def constants(items: int) -> st.SearchStrategy[Any]:
    """Parts that belong to no item."""
    size = items + 1
    return st.sampled_from([torch.tensor(3.0), torch.ones(size, size), 2.5, "words", None, ["a"] * size, {"a": 1}])


def nested(items: int) -> st.SearchStrategy[Any]:
    leaf = leaves(items) | constants(items)
    return st.recursive(
        leaf,
        lambda inner: (
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
            | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(Encoding)
            | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
            | st.tuples(inner, inner).map(list)
        ),
        max_leaves=5,
    )


PARTS = (Tensor, np.ndarray, dict, UserDict, list, tuple)


def flat(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.to_dense() if value.is_sparse else value]
    if isinstance(value, dict | UserDict):
        return [leaf for item in value.values() for leaf in flat(item)]
    if isinstance(value, list | tuple) and any(isinstance(v, PARTS) for v in value):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def cut(batch: Any, items: int, size: int) -> list[Any]:
    return [part for part, *_ in micro_batches_of(batch, items, size)]


@given(st.integers(3, 12).flatmap(lambda n: st.tuples(st.just(n), nested(n), st.integers(1, 14))))
def test_every_item_once_and_in_order(case: tuple[int, Any, int]) -> None:
    items, inner, size = case
    batch = (torch.arange(items), inner)
    pieces = cut(batch, items, size)
    assert all(type(piece) is tuple for piece in pieces)
    assert torch.cat([piece[0] for piece in pieces]).tolist() == list(range(items))
    assert max(len(piece[0]) for piece in pieces) <= max(size, 1)
    columns = zip(*(flat(piece) for piece in pieces), strict=True)
    for whole, parts in zip(flat(batch), columns, strict=True):
        per_item = (hasattr(whole, "shape") and whole.shape[:1] == (items,)) or (
            isinstance(whole, list | tuple) and len(whole) == items
        )
        if isinstance(whole, Tensor):
            assert torch.equal(torch.cat(parts) if per_item and len(parts) > 1 else parts[0], whole)
        elif isinstance(whole, np.ndarray):
            assert np.array_equal(np.concatenate(parts) if per_item else parts[0], whole)
        elif per_item:
            assert [item for part in parts for item in part] == list(whole)
        else:
            assert all(part == whole for part in parts)


@given(st.integers(1, 200), st.integers(1, 200))
def test_pieces_are_even(items: int, size: int) -> None:
    found = list(bounds(items, size))
    sizes = [stop - start for start, stop in found]
    assert sum(sizes) == items
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-items // size)
    assert [start for start, _ in found[1:]] == [stop for _, stop in found[:-1]]


def test_types_are_kept() -> None:
    x = torch.arange(4)
    batch = {
        "pair": Pair(x, ["a", "b", "c", "d"]),
        "record": Record(x, ["a", "b", "c", "d"]),
        "encoding": Encoding({"ids": x}),
        "frozen": types.MappingProxyType({"x": x}),
    }
    piece = rows_of(batch, 4, slice(1, 3))
    assert isinstance(piece["pair"], Pair)
    assert piece["pair"].label == ["b", "c"]
    assert isinstance(piece["record"], Record)
    assert (piece["record"].x.tolist(), piece["record"].names, piece["record"].scale) == ([1, 2], ["b", "c"], 2.0)
    assert isinstance(piece["encoding"], Encoding)
    assert piece["encoding"]["ids"].tolist() == [1, 2]
    assert piece["frozen"]["x"].tolist() == [1, 2]
    assert batch["encoding"]["ids"].tolist() == [0, 1, 2, 3], "the batch is as it was"


def test_encodings_and_outputs_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(12).view(4, 3), "names": ["a", "b", "c", "d"]})
    pieces = cut(encoding, items_in(encoding), 3)
    assert [type(piece) for piece in pieces] == [transformers.BatchEncoding] * 2
    assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces]), encoding["input_ids"])
    assert pieces[1].names == ["c", "d"]
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.zeros(4, 2))
    assert rows_of(output, 4, slice(0, 1)).last_hidden_state.shape == (1, 2)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_pictures_of_several_sizes_lie_in_lists(count: int) -> None:
    """Not their channels are cut, but the lists, also where there are as many pictures as channels."""
    pictures = [torch.full((3, 8 + i, 9), float(i)) for i in range(count)]
    targets = tuple({"boxes": torch.zeros(i, 4), "number": torch.tensor(i)} for i in range(count))
    batch = (pictures, targets)
    assert items_in(batch) == count
    pieces = cut(batch, count, 1)
    assert [piece[0][0].shape for piece in pieces] == [picture.shape for picture in pictures]
    assert [piece[1][0]["number"].item() for piece in pieces] == list(range(count))
    stacked = (torch.zeros(count, 3, 8, 8), list(targets))
    assert items_in(stacked) == count
    assert [len(piece[1]) for piece in cut(stacked, count, 1)] == [1] * count


def test_fields_of_a_batch_are_not_items() -> None:
    x = torch.arange(6).view(2, 3)  # two items, two fields
    assert items_in([x, x]) == 2
    first, second = cut([x, [x, x]], 2, 1)
    assert first[1][1].shape == (1, 3)
    assert torch.equal(torch.cat([first[0], second[0]]), x)


@pytest.mark.parametrize(
    ("batch", "items"),
    [
        (torch.zeros(7, 2), 7),
        ((torch.zeros(7, 2), torch.zeros(7)), 7),
        ((torch.tensor(1.0), torch.zeros(7)), 7),
        (torch.tensor(1.0), 1),
        ((), 1),
        ({}, 1),
        (["a", "b", "c"], 3),
        ({"text": ["a", "b", "c"], "scale": 2.0}, 3),
        ((["a", "b"], torch.zeros(2)), 2),
        ((torch.zeros(0, 3), torch.zeros(0)), 0),
        ("words", 1),
        (Record(torch.zeros(4), []), 4),
    ],
)
def test_how_many_items(batch: Any, items: int) -> None:
    assert items_in(batch) == count_items(batch) == items


class Graph:
    """Something that can move and cannot be cut."""

    def to(self, device: Any) -> "Graph":
        return self


@pytest.mark.parametrize("part", [pack_sequence([torch.zeros(2), torch.zeros(1)]), Graph()])
def test_what_cannot_be_cut_is_refused(part: Any) -> None:
    with pytest.raises(BadArgument, match="cannot be cut into micro-batches"):
        cut((torch.zeros(4), part), 4, 2)
