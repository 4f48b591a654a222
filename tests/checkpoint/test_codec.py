"""Trees come back exactly as they were, and what cannot is refused by its place."""

import inspect
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from hotloop.checkpoint.codec import pack, unpack
from hotloop.errors import BadArgument

from ..thorough import tries
from .trees import same

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


def again(tree: Any) -> Any:
    """The tree after a way through JSON text."""
    tensors, data = pack(tree)
    return unpack(tensors, json.loads(json.dumps(data, allow_nan=False)))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    made = torch.empty(shape, dtype=dtype)
    if size:
        made = torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
    return made.permute(draw(st.permutations(range(len(shape))))) if shape else made


NUMPY = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"), hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(sizes=(64, 128)), hnp.datetime64_dtypes(),
    hnp.byte_string_dtypes(), hnp.unicode_string_dtypes(),
)  # fmt: skip
WORDS = st.text() | st.sampled_from(["$tensor", "$dict", "", "__metadata__", "\ud800", "\ud83d\ude00", "a.b", "#0"])
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
LEAVES = (
    KEYS
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=4).map(bytearray)
    | st.integers(min_value=-(10**50), max_value=10**50)
    | tensors()
    | st.sampled_from([*DTYPES, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 0])])
    | NUMPY.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=3)))
    | NUMPY.flatmap(hnp.from_dtype)
    | st.sets(KEYS, max_size=3)
    | st.frozensets(KEYS, max_size=3)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(WORDS, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@settings(max_examples=tries(50, 300), deadline=None)
@given(TREES)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(again(tree), tree)


def test_an_integer_of_any_size_is_exact_also_as_a_key() -> None:
    large = 3**20000  # more digits than Python prints
    assert same(again({"n": large, "m": {-large: torch.ones(1)}}), {"n": large, "m": {-large: torch.ones(1)}})


def test_names_say_where_a_tensor_was_and_never_collide() -> None:
    tree = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "__metadata__": torch.ones(2), "c": [{7: torch.ones(3)}]}
    names = pack(tree)[0]
    assert "a.b" in names
    assert "c[0][7]" in names
    assert "__metadata__" not in names
    assert len(names) == 4
    assert same(again(tree), tree)


def test_the_tensors_are_not_copied() -> None:
    weight = nn.Parameter(torch.ones(2))
    packed = pack({"w": weight})[0]["w"]
    assert packed.data_ptr() == weight.data_ptr()
    assert not packed.requires_grad


def test_tied_weights_are_stored_once_and_come_back_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    packed, _ = pack(model.state_dict())
    assert len(packed) == 3
    loaded = again(model.state_dict())
    assert same(loaded, model.state_dict())
    assert loaded["a.weight"].data_ptr() == loaded["b.weight"].data_ptr()


def test_parts_of_one_memory_are_told_apart() -> None:
    whole = torch.arange(6.0)
    tree = [whole, whole[:3], whole[3:], whole.view(2, 3), whole.view(2, 3).t(), whole.expand(2, 6)]
    assert same(again(tree), tree)
    turned = torch.ones(2, dtype=torch.complex64) * 1j
    assert same(again([turned, turned.conj()]), [turned, turned.conj()])


@settings(deadline=None)
@given(st.permutations(range(4)))
def test_the_order_in_memory_comes_back(order: list[int]) -> None:
    tensor = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5).permute(order)
    assert again(tensor).stride() == tensor.stride()


def test_the_versions_of_layers_come_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    loaded = again(model.state_dict())
    assert loaded._metadata["1"] == {"version": 2}
    model.load_state_dict(loaded)


def test_a_defaultdict_comes_back_as_a_dict() -> None:
    assert same(again(defaultdict(list, {1: [2]})), {1: [2]})


def test_random_states_come_back() -> None:
    random.gauss(0, 1)  # which makes two numbers, and keeps one for later
    kinds = [getattr(np.random, kind)(7).state for kind in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")]
    states = (random.getstate(), np.random.get_state(), np.random.get_state(legacy=False), torch.get_rng_state(), kinds)
    assert same(again(states), states)


class Own:
    """A class of the person's own."""


CASES = {
    "schedulers[0].anneal_func": ({"schedulers": [{"anneal_func": math.cos}]}, "builtin_function_or_method"),
    "a.b[(1, 2)]": ({"a": {"b": {(1, 2): Own()}}}, "Own"),
    "pair": ({"pair": namedtuple("pair", "x y")(1, 2)}, "pair"),
    "grid": ({"grid": torch.ones(2, 2).to_sparse()}, "sparse_coo"),
    "ghost": ({"ghost": torch.ones(2, device="meta")}, "meta"),
    "objects": ({"objects": np.array([Own()])}, "numpy.ndarray"),
    "the whole": (Own(), "Own"),
    "keys": ({"keys": {Own(): 1}}, "Own"),
    "numbers": ({"numbers": {np.float64(1)}}, "numpy.float64"),
}


@pytest.mark.parametrize("place", CASES)
def test_what_cannot_be_held_is_named_by_place_and_type(place: str) -> None:
    tree, kind = CASES[place]
    with pytest.raises(BadArgument) as caught:
        pack(tree)
    assert f"cannot hold {place}:" in caught.value.what
    assert kind in caught.value.what
    assert caught.value.fix


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(BadArgument, match="contain itself"):
        pack(tree)


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 3, bias=False)


OPTIMIZERS = sorted(
    name for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and issubclass(kind, Optimizer)
)
OPTIMIZERS.remove("Optimizer")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_comes_back(name: str) -> None:
    sparse = name == "SparseAdam"
    module = nn.Embedding(4, 3, sparse=True) if sparse else _layers()
    inputs = torch.tensor([1, 2]) if sparse else torch.randn(5, 3)
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": torch.tensor(0.1)} if name == "AdamW" else {}
    optimizer = getattr(torch.optim, name)(module.parameters(), **options)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = module(inputs).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    before = optimizer.state_dict()
    loaded = again(before)
    assert same(loaded, before)
    optimizer.load_state_dict(loaded)
    optimizer.step(loss)


class Decay:
    """A rule of the person's own, whose attributes a scheduler saves."""

    def __init__(self) -> None:
        self.rate = 0.9

    def __call__(self, epoch: float) -> float:
        return self.rate**epoch


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Decay()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [2])], [1]
    ),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2), lr_scheduler.LinearLR(o)]),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "CyclicLR of an object": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, scale_fn=Decay()),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def test_no_scheduler_of_torch_is_forgotten() -> None:
    kinds = {n for n, k in vars(lr_scheduler).items() if inspect.isclass(k) and issubclass(k, lr_scheduler.LRScheduler)}
    assert kinds - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.filterwarnings("ignore:Please also save or load the state of the optimizer")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_comes_back(name: str) -> None:
    def make() -> tuple[Optimizer, Any]:
        optimizer = torch.optim.SGD(_layers().parameters(), lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def step(optimizer: Optimizer, schedule: Any) -> float:
        optimizer.step()
        schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    optimizer, schedule = make()
    for _ in range(2):
        step(optimizer, schedule)
    state = schedule.state_dict()
    loaded = again(state)
    assert same(loaded, state)
    other, resumed = make()
    other.load_state_dict(again(optimizer.state_dict()))
    resumed.load_state_dict(loaded)
    assert [step(other, resumed) for _ in range(4)] == [step(optimizer, schedule) for _ in range(4)]


HOSTILE: list[Any] = [
    {"$tensor": "../../etc/passwd"}, {"$tensor": []}, {"$tensor": "w", "order": [0, 0]},
    {"$tensor": "w", "order": ["a"]},
    {"$tensor": "w", "dtype": "os.system"}, {"$tensor": "w", "dtype": "torch.int64", "shape": [9, 9]},
    {"$int": 5}, {"$int": "zz"}, {"$float": "00"}, {"$str": "ff"}, {"$bytes": "é"}, {"$tuple": 3}, {"$size": ["a"]},
    {"$dict": [[[1], 2]]}, {"$dict": [[1]]}, {"$dict": 5}, {"$set": [[1]]}, {"$counter": [1]}, {"$ordered": 3},
    {"$ordered": {}, "metadata": 5}, {"$dtype": "load"}, {"$dtype": {}}, {"$device": 0}, {"$device": "no such"},
    {"$array": "w", "dtype": "O", "shape": [1]}, {"$array": "w", "dtype": "i4,i4", "shape": [1]},
    {"$array": "w", "dtype": "<f4", "shape": [1 << 62]}, {"$array": "w", "dtype": "|S0", "shape": [1 << 62]},
    {"$array": "e", "dtype": "|S0", "shape": [1 << 62]}, {"$array": "e", "dtype": "<f4", "shape": [0, 1 << 70]},
    {"$array": "w", "dtype": ["O"], "shape": "ab"}, {"$scalar": "O", "bytes": "00" * 8}, {"$scalar": "<f8"},
    {"$eval": "print(1)"}, {"$": 1},
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=str)
def test_data_from_elsewhere_is_a_value_error_and_nothing_else(data: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpack({"w": torch.zeros(3), "e": torch.zeros(0, dtype=torch.uint8)}, {"deep": [data]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.just("w"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*(next(iter(h)) for h in HOSTILE), "dtype", "shape", "order", "bytes"]), inner
        )
    ),
)


@settings(max_examples=tries(50, 300), deadline=None)
@given(JSON)
def test_any_json_is_a_tree_or_a_value_error(data: Any) -> None:
    with suppress(ValueError):
        unpack({"w": torch.zeros(3)}, data)


def test_deep_data_is_a_value_error() -> None:
    data: Any = 0
    for _ in range(5000):
        data = {"$tuple": [data]}
    with pytest.raises(ValueError, match="Recursion"):
        unpack({}, data)
