"""The metrics that come with hotloop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotloop.errors import BadArgument
from hotloop.metrics import absolute_error, accuracy, squared_error, top_k


@given(st.integers(1, 30), st.integers(2, 6), st.integers(0, 1000))
def test_accuracy_is_the_share_of_right_classes(items: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    output = torch.rand(items, classes, generator=generator)
    target = torch.randint(classes, (items,), generator=generator)
    right = [int(row.argmax()) == int(label) for row, label in zip(output, target, strict=True)]
    assert accuracy(output, target).tolist() == right
    assert top_k(1)(output, target).tolist() == right
    assert top_k(classes)(output, target).all()


def test_pixels_and_ignored_labels() -> None:
    output = torch.zeros(2, 3, 4, 4)
    output[:, 1] = 1
    target = torch.ones(2, 4, 4, dtype=torch.long)
    target[0, 0] = -100
    target[1] = 2
    assert accuracy(output, target).numel() == 28
    assert accuracy(output, target).float().mean() == pytest.approx(12 / 28)


def test_binary_and_soft_targets() -> None:
    assert accuracy(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0])).tolist() == [True, False]
    assert accuracy(torch.tensor([[2.0], [-1.0]]), torch.tensor([[1.0], [0.0]])).tolist() == [True, True]
    for target in (torch.tensor([1, 1]), torch.tensor([1.0, 1.0])):  # without the dimension of the output
        assert accuracy(torch.tensor([[2.0], [-1.0]]), target).tolist() == [True, False]
    assert accuracy(torch.ones(2, 1, 3, 3), torch.ones(2, 3, 3)).tolist() == [True] * 18
    with pytest.raises(BadArgument, match=r"\(2, 3\) is not the classes of a target of shape \(2, 1\)"):
        accuracy(torch.ones(2, 3), torch.ones(2, 1).long())
    soft = torch.tensor([[0.2, 0.8]])
    assert accuracy(torch.tensor([[0.0, 1.0]]), soft).tolist() == [True]


def test_errors_of_numbers() -> None:
    output, target = torch.tensor([[1.0], [4.0]]), torch.tensor([[2.0], [2.0]])
    assert absolute_error(output, target).tolist() == [1.0, 2.0]
    assert squared_error(output, target).tolist() == [1.0, 4.0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: accuracy(torch.rand(4, 3), torch.zeros(5, dtype=torch.long)),
        lambda: top_k(0),
        lambda: top_k(2)(torch.rand(4), torch.zeros(4, dtype=torch.long)),
        lambda: squared_error(torch.rand(4, 1), torch.rand(4)),
    ],
)
def test_what_does_not_fit_is_refused_with_a_fix(wrong: object) -> None:
    with pytest.raises(BadArgument, match="fix"):
        wrong()
