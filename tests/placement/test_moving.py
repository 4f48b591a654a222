"""`move`, `tensors_in` and `to_numpy`: any nesting, kept types, no needless copies."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from hotloop import move, to_numpy
from hotloop.errors import BadArgument
from hotloop.placement import pin, upload
from hotloop.values.tree import map_tensors, tensors_in

Pair = namedtuple("Pair", ["image", "label"])


@dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    name: str
    derived: int = field(init=False, default=7)


@dataclass
class Counting:
    image: torch.Tensor
    built: int = 0

    def __post_init__(self) -> None:
        self.built += 1


class Movable:
    def __init__(self, where: str = "cpu") -> None:
        self.where = where

    def to(self, device: Any) -> "Movable":
        return Movable(str(device))


def zeros() -> torch.Tensor:
    return torch.zeros(2, 3)


CONTAINERS = {
    "dict": lambda t: {"a": t, "b": "text"},
    "ordered": lambda t: OrderedDict(a=t),
    "default": lambda t: defaultdict(list, a=t),
    "userdict": lambda t: UserDict(a=t),
    "list": lambda t: [t, 1],
    "tuple": lambda t: (t, None),
    "namedtuple": lambda t: Pair(t, 3),
    "dataclass": lambda t: Frozen(t, "x"),
    "nested": lambda t: {"a": [(t, {"b": Pair(t, [Frozen(t, "deep")])})]},
}


@pytest.mark.parametrize("build", CONTAINERS.values(), ids=CONTAINERS)
def test_every_container_moves_and_keeps_its_type(build: Any) -> None:
    batch = build(zeros())
    assert move(batch, "cpu") is batch
    moved = move(batch, "meta")
    assert {t.device.type for _, t in tensors_in(batch)} == {"cpu"}, "what was given is as it was"
    assert type(moved) is type(batch)
    assert {t.device.type for _, t in tensors_in(moved)} == {"meta"}
    assert [name for name, _ in tensors_in(moved)] == [name for name, _ in tensors_in(batch)]


def test_what_lies_deep_and_elsewhere_moves_and_the_rest_is_shared() -> None:
    there, pair = torch.zeros(2, device="meta"), (torch.zeros(2, device="meta"), 3)
    moved = move({"x": there, "names": ["a"], "deep": [pair, zeros()]}, "meta")
    assert moved["x"] is there
    assert moved["deep"][0] is pair
    assert moved["deep"][1].device.type == "meta"


def test_a_default_dict_keeps_its_factory() -> None:
    assert move(defaultdict(list, a=zeros()), "meta")["new"] == []


def test_a_dataclass_is_copied_not_built_again() -> None:
    moved = move(Counting(zeros()), "meta")
    assert (moved.image.device.type, moved.built) == ("meta", 1)
    assert move(Frozen(zeros(), "x"), "meta").derived == 7


@pytest.mark.parametrize(
    "value", [None, 3, "text", b"bytes", 2.5, {1, 2}, range(3), torch.float32, torch.Tensor, Frozen]
)
def test_everything_else_is_left_alone(value: object) -> None:
    assert move(value, "meta") is value


def test_anything_with_to_moves_itself() -> None:
    assert move({"x": Movable()}, "meta")["x"].where == "meta"


def test_packed_sequences() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert move(packed, "cpu") is packed
    moved = move(packed, "meta")
    assert type(moved) is type(packed)
    assert moved.data.device.type == "meta"
    assert [name for name, _ in tensors_in(packed)] == ["batch.data"]


def test_hugging_face_encodings() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.zeros(2, 4, dtype=torch.long), "text": ["a", "b"]})
    moved = move(batch, "meta")
    assert type(moved) is transformers.BatchEncoding
    assert moved["input_ids"].device.type == "meta"
    assert moved["text"] == ["a", "b"]
    assert batch["input_ids"].device.type == "cpu", "its own `.to` would have moved the one that was given"
    assert move(batch, "cpu") is batch
    first = map_tensors(batch, lambda tensor: tensor[:1])
    assert type(first) is transformers.BatchEncoding
    assert (first["input_ids"].shape, batch["input_ids"].shape) == ((1, 4), (2, 4))


class Batch(dict[str, Any]):
    """A dict that moves itself, as people write one for their batches."""

    def to(self, device: Any) -> "Batch":
        return Batch({key: value.to(device) for key, value in self.items()})


@pytest.mark.parametrize("build", [Batch, UserDict])
def test_tensors_in_a_mapping_that_moves_itself_are_changed_and_pinned(build: Any, monkeypatch: Any) -> None:
    batch = {"deep": [build(a=zeros())]}
    changed = map_tensors(batch, lambda tensor: tensor + 1)
    assert type(changed["deep"][0]) is build
    assert torch.equal(changed["deep"][0]["a"], zeros() + 1)
    assert torch.equal(batch["deep"][0]["a"], zeros())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 2)  # pinned memory needs CUDA
    assert torch.equal(pin(batch)["deep"][0]["a"], zeros() + 2)


leaves = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just(torch.zeros(1)), st.just(torch.ones(2, 2)))
nestings = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


@given(nestings)
def test_any_nesting_there_and_back(batch: Any) -> None:
    assert move(batch, "cpu") is batch
    before = list(tensors_in(batch))
    after = list(tensors_in(move(batch, "meta")))
    assert [(n, t.shape) for n, t in after] == [(n, t.shape) for n, t in before]
    assert all(t.device.type == "meta" for _, t in after)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, np.float32),
        (torch.float64, np.float64),
        (torch.float16, np.float16),
        (torch.bfloat16, np.float32),
        (torch.float8_e4m3fn, np.float32),
        (torch.int64, np.int64),
        (torch.bool, np.bool_),
        (torch.complex64, np.complex64),
        (torch.complex32, np.complex64),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_to_numpy_has_every_dtype(dtype: torch.dtype, expected: type) -> None:
    array = to_numpy(torch.tensor([1, 0, 1]).to(dtype))
    assert array.dtype == expected
    assert array.tolist() == [1, 0, 1]


def test_what_holds_itself_is_searched_and_not_moved(monkeypatch: Any) -> None:
    shared = [torch.zeros(1)]
    batch: dict[str, Any] = {"first": shared, "second": shared}
    assert [name for name, _ in tensors_in(batch)] == ["batch['first'][0]", "batch['second'][0]"]
    batch["itself"] = [batch]
    assert [name for name, _ in tensors_in(batch)] == ["batch['first'][0]", "batch['second'][0]"]
    for device in ("cpu", "meta"):
        with pytest.raises(BadArgument, match="the batch, a dict, holds itself"):
            move(batch, device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with pytest.raises(BadArgument, match="the batch, a dict, holds itself"):
        pin(batch)


def test_to_numpy_of_what_is_no_tensor_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(BadArgument, match=r"given a list, and takes one tensor\n +fix: .*for t in tensors"):
        to_numpy([torch.ones(1)])


def test_to_numpy_from_awkward_tensors() -> None:
    grown = torch.ones(2, requires_grad=True) * 3
    assert to_numpy(grown).tolist() == [3, 3]
    assert to_numpy(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]
    assert to_numpy(torch.tensor([1j]).conj()).tolist() == [-1j]
    assert to_numpy(torch.tensor(5)).tolist() == 5


@pytest.mark.gpu
def test_pinned_memory_moves_without_waiting_and_the_rest_waits() -> None:
    pinned, pageable = torch.randn(1 << 20).pin_memory(), torch.randn(1 << 20)
    moved = move({"a": pinned, "b": pageable}, "cuda")
    torch.cuda.synchronize()
    assert torch.equal(moved["a"].cpu(), pinned)
    assert torch.equal(moved["b"].cpu(), pageable)
    back = move(moved, "cpu")  # never asynchronous: the values are there when the call returns
    assert torch.equal(back["a"], pinned)


@pytest.mark.gpu
def test_to_numpy_from_the_gpu() -> None:
    assert to_numpy(torch.ones(2, device="cuda", dtype=torch.bfloat16, requires_grad=True)).tolist() == [1, 1]


@pytest.mark.gpu
def test_large_tensors_are_uploaded_piece_by_piece() -> None:
    large, small = torch.randn((80 << 20) // 4 + 3), torch.arange(5)
    items = {"x": large.view(-1, 1)[1:], "flags": large > 0, "y": small, "pinned": small.pin_memory()}
    for name, moved in upload(items, torch.device("cuda")).items():
        assert moved.device.type == "cuda"
        assert torch.equal(moved.cpu(), items[name]), name


def test_on_a_cpu_nothing_is_uploaded() -> None:
    items = [torch.ones(3)]
    assert upload(items, torch.device("cpu")) is items


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # of PyTorch, which calls them a prototype
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_to_numpy_of_a_nested_tensor_says_how_to_take_its_parts(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)
    with pytest.raises(BadArgument, match=r"nested tensor(.|\n)*unbind\(\)"):
        to_numpy(nested)
    assert [to_numpy(part).tolist() for part in nested.unbind()] == [[1], [1, 1]]
