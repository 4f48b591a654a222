"""Stretches of time: what is joined, shared and left over is the same as counting moments one by one."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hotloop.profiling.time_parts import joined, length, within, without

STRETCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def moments(stretches: list[tuple[float, float]]) -> set[int]:
    return {moment for start, end in stretches for moment in range(int(start), int(end))}


@given(STRETCHES, STRETCHES)
def test_they_are_sets_of_moments(first, second) -> None:
    a, b = joined(first), joined(second)
    assert moments(a) == moments(first)
    assert moments(within(a, b)) == moments(first) & moments(second)
    assert moments(without(a, b)) == moments(first) - moments(second)
    assert length(a) == len(moments(first))
    for result in (a, within(a, b), without(a, b)):
        assert all(start < end for start, end in result)
        assert all(before[1] <= after[0] for before, after in pairwise(result))
