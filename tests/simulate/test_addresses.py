"""Addresses go down as those of CUDA's driver do."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.allocator import Addresses, Allocator

MIB, GIB = 2**20, 2**30


def test_the_driver_goes_down_and_fills_what_its_ranges_have_left() -> None:
    """As it was seen in trainings on an H200, in ranges of 32 MiB: it decides between free blocks of one size."""
    allocator = Allocator(4 * GIB)
    first, second, small, third = (allocator.allocate(size * MIB).address for size in (392, 196, 16, 394))
    assert first > second > third
    assert first - second == 224 * MIB
    assert small == second + 196 * MIB
    allocator.addresses.kernels_loaded()
    above, still, below = (allocator.allocate(size * MIB).address for size in (200, 100, 400))
    assert above > first
    assert still == above + 200 * MIB
    assert below < third


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60))
def test_segments_never_overlap(sizes: list[int]) -> None:
    addresses = Addresses()
    ranges = sorted((addresses.place(size * MIB), size * MIB) for size in sizes)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(ranges))
