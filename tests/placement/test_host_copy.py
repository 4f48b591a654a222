"""`HostCopy`: all numbers arrive, of any shapes and dtypes, and on a GPU nothing waits for them."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotloop.placement.host_copy import FEW_TENSORS, HostCopy

SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64])


def tensors(shapes: list[list[int]], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    return [
        torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=False)
    ]


@given(shapes=SHAPES, dtypes=st.lists(DTYPES, min_size=6, max_size=6))
def test_all_numbers_come_in_their_order(shapes: list[list[int]], dtypes: list[torch.dtype]) -> None:
    given = tensors(shapes, dtypes)
    copy = HostCopy(given)
    assert copy.has_landed()
    assert copy.numbers().tolist() == [number for tensor in given for number in tensor.double().flatten().tolist()]


def test_gradients_do_not_come_along() -> None:
    assert HostCopy([torch.ones(2, requires_grad=True) * 3]).numbers().tolist() == [3.0, 3.0]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, FEW_TENSORS, 3 * FEW_TENSORS])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16, torch.int64)])
def test_on_a_gpu_nothing_waits_and_later_changes_do_not_count(
    count: int, dtypes: tuple[torch.dtype, ...], no_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    given = [torch.full((2,), n, dtype=dtypes[n % len(dtypes)], device="cuda") for n in range(count)]
    with no_waits():
        copy = HostCopy(given)
        for tensor in given:
            tensor.zero_()
        deadline = time.monotonic() + 5
        while not copy.has_landed() and time.monotonic() < deadline:
            pass
        assert copy.numbers().tolist() == [float(n) for n in range(count) for _ in range(2)]
