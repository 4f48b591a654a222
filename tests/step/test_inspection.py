"""Inspection: a step that does the same work each time is let through, another one is named with its line."""

import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotloop.step.inspection import Comparison, Inspection, Looks, inspected, objection, signature

CPU = torch.device("cpu")
X = torch.ones(6, 6)  # of more values than are looked at: what a batch holds may differ


def objection_to(forward: Callable[[int], object], passes: tuple[int, int] = (1, 2)) -> str | None:
    """What is said of a forward pass that is told its number."""
    seen = [Inspection(), Inspection()]
    for inspection, number in zip(seen, passes, strict=True):
        with inspected(CPU, inspection):
            forward(number)
    return objection(*seen)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.LayerNorm(20))


def test_the_same_work_on_other_data_is_fine() -> None:
    net, data = model(), torch.randn(3, 6, 6)
    assert objection_to(lambda number: net(data[[number]]) + 1) is not None, "an index of the host is a number"
    batches = [data[0], data[1], data[2]]
    assert objection_to(lambda number: net(batches[number]) + 1) is None


def test_a_number_that_changes_is_named_with_its_line() -> None:
    net = model()

    def forward(number: int) -> Tensor:
        return net(X) * (1 + number / 1000)  # another one each time

    why = objection_to(forward)
    assert "other work in each step" in why
    line = forward.__code__.co_firstlineno + 1
    assert f"test_inspection.py:{line}: return net(X) * (1 + number / 1000)  # another one each time" in why
    assert objection_to(forward, (1, 1)) is None


CHANGES: dict[str, Callable[[int], object]] = {
    "a number": lambda number: X * (number / 10),
    "a number by name": lambda number: torch.add(X, X, alpha=number),
    "a shape": lambda number: X[:, :number] + 1,
    "a word": lambda number: nn.functional.interpolate(X[None, None], (8, 8), mode=["", "nearest", "bilinear"][number]),
    "a type": lambda number: X.to([None, torch.float64, torch.bfloat16][number]),
    "a list": lambda number: X.sum([number - 1]),
    "a small tensor of the host": lambda number: X + torch.tensor(float(number)),
    "one operation more": lambda number: [X + 1 for _ in range(number)] + [X * 2],
    "another operation": lambda number: X.sin() if number == 1 else X.cos(),
    "the order": lambda number: X.sin().cos() if number == 1 else X.cos().sin(),
}


@pytest.mark.parametrize("forward", CHANGES.values(), ids=CHANGES)
def test_whatever_a_capture_would_freeze_is_found(forward: Callable[[int], object]) -> None:
    for passes in ((1, 2), (2, 1)):
        why = objection_to(forward, passes)
        assert "other work in each step" in why
        assert f"test_inspection.py:{forward.__code__.co_firstlineno}:" in why
    assert objection_to(forward, (2, 2)) is None


DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "numpy": np.random.rand,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("drawn_in", [1, 2])
def test_a_draw_on_the_host_is_found_in_either(draw: Callable[[], object], drawn_in: int) -> None:
    def forward(number: int) -> None:
        if number == drawn_in:
            draw()

    assert objection_to(forward) == "it draws random numbers on the host, which a capture would freeze"


def test_several_objectives_in_one_inspection() -> None:
    """A draw of the first is not forgotten by the second."""
    seen = Inspection()
    for draw in (True, False):
        with inspected(CPU, seen):
            X.sin()
            if draw:
                torch.randn(1)
    assert seen.drew
    assert len(seen.work) == 3


@pytest.mark.parametrize(
    ("now", "differs"),
    [
        (lambda x: (x * 2.0).relu(), False),
        (lambda x: (x * 3.0).relu(), True),
        (lambda x: (x * 2.0).sigmoid(), True),
        (lambda x: x * 2.0, True),
        (lambda x: (x * 2.0).relu() + 1, True),
    ],
    ids=["same", "number", "operation", "less", "more"],
)
def test_a_later_pass_is_compared_as_it_runs(now: Callable[[Tensor], Tensor], differs: bool) -> None:
    seen, then, later = Inspection(), torch.randn(32), torch.randn(32)
    with inspected(CPU, seen):
        (then * 2.0).relu()
    comparison = Comparison(seen)
    with comparison:
        given = now(later)
    assert torch.equal(given, now(later))
    assert (comparison.departure() is not None) == differs


def test_a_comparison_may_be_entered_several_times() -> None:
    first, second = Inspection(), Inspection()
    with inspected(CPU, first):
        torch.ones(4) * 2.0
    with inspected(CPU, second):
        torch.ones(4).relu()
    comparison = Comparison(first, second)
    with comparison:
        torch.ones(4) * 2.0
    torch.ones(4).sigmoid()  # nobody's business
    with comparison:
        torch.ones(4).relu()
    assert comparison.departure() is None


def test_an_error_inside_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError), inspected(CPU, Inspection()):
        raise ZeroDivisionError
    seen = Inspection()
    with inspected(CPU, seen):
        pass
    X.sin()
    assert seen.work == [], "nothing is watched after the block"


def test_a_number_that_is_none_is_the_same_number() -> None:
    assert objection_to(lambda number: torch.full((6, 6), float("nan"))) is None


Pair = namedtuple("Pair", ["x", "y"])
Other = namedtuple("Other", ["x", "y"])
leaves = st.one_of(
    st.builds(torch.zeros, st.lists(st.integers(0, 3), max_size=3)),
    st.builds(lambda n: torch.zeros(n, dtype=torch.int64), st.integers(0, 3)),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.none(),
    st.booleans(),
)
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


def with_other_values(batch: Any) -> Any:
    """The same batch with every tensor made anew, of other values."""
    if isinstance(batch, Tensor):
        return torch.ones_like(batch)
    if isinstance(batch, dict):
        return {key: with_other_values(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        items = [with_other_values(item) for item in batch]
        return Pair(*items) if isinstance(batch, Pair) else type(batch)(items)
    return batch


@settings(deadline=None)
@given(batches)
def test_the_values_of_tensors_do_not_matter(batch: Any) -> None:
    form = signature(batch)
    assert form == signature(with_other_values(batch))
    assert hash(form) == hash(signature(with_other_values(batch)))
    if batch is not None:
        assert form is not None


@settings(deadline=None)
@given(batches, st.sampled_from([lambda b: [b], lambda b: (b,), lambda b: {"x": b}, lambda b: Pair(b, 1)]))
def test_the_nesting_matters(batch: Any, wrap: Callable[[Any], Any]) -> None:
    assert signature(batch) != signature(wrap(batch))


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "size": ([torch.zeros(4, 3)], [torch.zeros(2, 3)]),
    "dimensions": (torch.zeros(1), torch.zeros(())),
    "type": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "layout": (torch.zeros(3, 3), torch.zeros(3, 3).t()),
    "channels last": (torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    "list or tuple": ([torch.zeros(2)], (torch.zeros(2),)),
    "tuple or named": ((1, 2), Pair(1, 2)),
    "another name": (Other(1, 2), Pair(1, 2)),
    "kind of dict": ({"x": 1}, OrderedDict(x=1)),
    "key": ({"x": torch.zeros(2)}, {"y": torch.zeros(2)}),
    "one more": ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
    "number": ((torch.zeros(2), 1), (torch.zeros(2), 2)),
    "word": ({"task": "a"}, {"task": "b"}),
    "nothing": ((torch.zeros(2), None), (torch.zeros(2), 0)),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_must_be_the_same_in_every_batch(one: Any, other: Any) -> None:
    assert signature(one) is not None
    assert signature(other) is not None
    assert signature(one) != signature(other)


@dataclass
class Record:
    x: Tensor


class Encoding(dict):
    """A batch that moves itself, as those of tokenizers do."""

    def to(self, device: object) -> "Encoding":
        return self


UNKNOWN: dict[str, Any] = {
    "set": {1, 2},
    "array": np.zeros(3),
    "record": Record(torch.zeros(2)),
    "object": SimpleNamespace(x=1),
    "function": lambda: None,
    "encoding": Encoding(x=torch.zeros(2)),
}


@pytest.mark.parametrize("value", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [torch.zeros(2), v], lambda v: {"a": (v,)}])
def test_what_cannot_be_compared_has_no_signature(value: Any, wrap: Callable[[Any], Any]) -> None:
    assert signature(wrap(value)) is None


def test_packed_sequences_of_other_lengths_are_not_the_same() -> None:
    def packed(*lengths: int) -> Any:
        return nn.utils.rnn.pack_sequence([torch.zeros(length, 2) for length in lengths])

    one, other = packed(3, 2, 2), packed(3, 3, 1)
    assert one.data.shape == other.data.shape
    assert one.batch_sizes.shape == other.batch_sizes.shape
    assert signature([one]) is None or signature([one]) != signature([other])


def test_a_seed_that_is_drawn_for_the_dropout_of_a_recurrent_layer_says_nothing_about_the_step() -> None:
    """As PyTorch draws it for cuDNN in the first pass after a generator was set."""
    x, seen = torch.randn(3), Inspection()
    with inspected(CPU, seen):
        x.exp().sum()
    same, other = Comparison(seen), Comparison(seen)
    with same:
        torch.empty((), dtype=torch.int64).random_().item()
        x.exp().sum()
    with other:
        torch.empty((), dtype=torch.int64).random_().item()
        x.sin().sum()
    assert same.departure() is None
    assert other.departure() is not None


def test_an_allocation_is_no_work() -> None:
    """What is written there is an operation with that shape."""
    assert objection_to(lambda number: [X.sin(), *(torch.empty(3) for _ in range(number))]) is None
    assert objection_to(lambda number: [torch.empty(number * 20).fill_(1)]) is not None


WAITS, DRAWS_ONCE = "waits", "draws"


def looked_at(*seen: str) -> Looks:
    """Looks at passes that do the same work; some wait or draw on the host, as cuDNN's preparations do."""
    looks, net = Looks(), model()
    for kind in seen:
        looks.made.append(Inspection())
        with inspected(CPU, looks.made[-1]):
            net(X)
            if kind == DRAWS_ONCE:
                DRAWS["python"]()
        if kind == WAITS:
            looks.made[-1].waits.note()
    return looks


@pytest.mark.parametrize("kind", [WAITS, DRAWS_ONCE])
def test_what_was_seen_once_is_no_reason(kind: str) -> None:
    """An LSTM with dropout lost its CUDA graph: cuDNN waits in its first call with a new dropout state."""
    assert looked_at("", "").are_enough
    assert looked_at("", "").objection() is None
    for seen in (("", kind), (kind, "")):
        assert not looked_at(*seen).are_enough, "one more"
    for seen in ((kind, "", ""), ("", kind, "", "")):
        looks = looked_at(*seen)
        assert looks.are_enough
        assert looks.objection() is None


@pytest.mark.parametrize("kind", [WAITS, DRAWS_ONCE])
def test_what_comes_again_is_a_reason(kind: str) -> None:
    for seen in ((kind, kind), ("", kind, kind), ("", kind, "", kind), (kind, "", kind, "")):
        looks = looked_at(*seen)
        assert looks.are_enough
        assert looks.objection() is not None


def test_other_work_is_a_reason_at_once_although_it_waits_as_well() -> None:
    """It is evidence that steps differ: a later look may not show it."""
    looks = Looks()
    for number in (1, 2):
        looks.made.append(Inspection())
        with inspected(CPU, looks.made[-1]):
            X.sin() if number == 1 else X.cos()
    looks.made[0].waits.note()
    assert looks.are_enough
    assert looks.objection() is not None
