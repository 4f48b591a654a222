"""What sums over many rows take for a moment: as it was seen on an H200, and as a GPU that is here says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.families.reduction import buffers
from hotloop.apps.simulate.library_memory import constants_for
from hotloop.apps.simulate.workspaces import needs

H200 = card("h200")
MIB = 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEEN = [  # sizes, type, what is added up, MiB on an H200 with torch 2.11
    ((4096, 4096), "float32", [0], 128.0),
    ((9456, 768), "bfloat16", [0], 55.5),
    ((9456, 3072), "bfloat16", [0], 132.0),
    ((9456, 2304), "bfloat16", [0], 132.8),
    ((65536, 512), "float32", [0], 132.0),
    ((65536, 64), "float32", [0], 8.0),
    ((25216, 384), "float32", [0], 73.9),
    ((25216, 1152), "float32", [0], 132.2),
    ((64, 128, 10000), "float32", [0, 1], 131.8),
    ((4096, 256), "float32", [0], 8.0),
]
MORE = [
    *(((rows, width), "float32", [0]) for rows in (3000, 20000, 131072) for width in (6, 33, 100, 1024, 5000)),
    *(((rows, width), "bfloat16", [0]) for rows in (3000, 20000) for width in (6, 33, 100, 1024, 5000)),
    *(((48, 64, 96, 96), "float32", dims) for dims in ([0], [1], [2, 3], [0, 2, 3], [3], [0, 1])),
    *(((8192, 8192), "float32", dims) for dims in ([0], [1])),
]


def shape(sizes: tuple[int, ...], dtype: str) -> Shape:
    return Shape(sizes, dtype, DTYPES[dtype].itemsize)


def taken(sizes: tuple[int, ...], dtype: str, over: list[int]) -> int:
    return sum(need.bytes for need in buffers(shape(sizes, dtype), over, H200))


@pytest.mark.parametrize(("sizes", "dtype", "over", "seen"), SEEN)
def test_what_was_seen_is_said(sizes: tuple[int, ...], dtype: str, over: list[int], seen: float) -> None:
    assert taken(sizes, dtype, over) / MIB == pytest.approx(seen, abs=0.06)


def test_a_sum_needs_it_and_a_small_one_nothing() -> None:
    constants = constants_for(H200, "2.11")

    def need(rows: int) -> int:
        x, y = shape((rows, 512), "float32"), shape((512,), "float32")
        found = needs(Operation("aten.sum.dim_IntList", (x,), (y,), {"dim": [0]}), H200, constants)
        return sum(each.bytes for each in found)

    assert need(65536) == pytest.approx(132 * MIB, rel=1e-3)
    assert need(16) == 0


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.lists(st.integers(-4, 3), max_size=4),
    st.permutations(range(4)),
)
def test_any_sum_has_an_answer(sizes: list[int], over: list[int], order: list[int]) -> None:
    dims = sorted({axis for axis in over if -len(sizes) <= axis < len(sizes)})
    x = torch.empty(sizes, device="meta").permute([axis for axis in order if axis < len(sizes)])
    strided = Shape(tuple(x.shape), "float32", 4, strides=() if x.is_contiguous() else tuple(x.stride()))
    assert all(need.bytes > 0 for need in buffers(strided, dims, H200))


def test_what_one_kernel_cannot_point_into_is_added_up_in_parts() -> None:
    assert taken((2**20, 4096), "float32", [0]) == taken((2**17, 4096), "float32", [0])


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "dtype", "over"), [*((s, d, o) for s, d, o, _ in SEEN), *MORE])
def test_a_gpu_takes_as_much(sizes: tuple[int, ...], dtype: str, over: list[int]) -> None:
    if torch.cuda.get_device_properties(0).multi_processor_count != H200.sms:
        pytest.skip("the number of blocks is that of an H200")
    x = torch.ones(sizes, device="cuda", dtype=DTYPES[dtype])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    y = x.sum(over)
    beside = (
        torch.cuda.memory_stats()["requested_bytes.all.peak"] - torch.cuda.memory_stats()["requested_bytes.all.current"]
    )
    assert y.numel() > 0
    assert taken(sizes, dtype, over) == pytest.approx(beside, abs=64 * 1024)
