"""Convolutions by the nearest one that was measured: what a measurement becomes, and what it says of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolution_plans import plan_of
from hotloop.apps.simulate.convolution_workspaces import (
    Case,
    ConvolutionTiming,
    case_of,
    neighbours,
    workspace,
)

MIB = 2**20
CASE = Case(32, 64, 128, 56, 3)
numbers = st.integers(1, 2048)
sides = st.integers(1, 256), st.integers(1, 7), st.integers(1, 3)
rest = st.just(1), st.integers(1, 3), st.integers(1, 64)  # groups, dimensions, dilation
cases = st.builds(Case, numbers, numbers, numbers, *sides, *rest)


def bytes_of(plan: ConvolutionTiming, case: Case, x: int, weight: int, y: int) -> int:
    return workspace((str(plan),), case, x, weight, y).bytes


@given(cases, *[st.integers(MIB, 500 * MIB)] * 2, st.integers(1000, 20 * MIB), st.integers(0, 9000 * MIB))
def test_what_was_measured_is_said_again(case: Case, x: int, y: int, weight: int, seen: int) -> None:
    for part in ("forward", "input", "weight"):
        plan = plan_of(part, case, x, weight, y, seen)
        assert min(plan[1:]) >= 0
        assert bytes_of(plan, case, x, weight, y) == pytest.approx(seen, rel=2e-3, abs=2e-3 * (x + weight + y))
        assert ConvolutionTiming.read(str(plan)).case == case


@pytest.mark.parametrize("copies", [(0, 0, 0), (1, 1, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)])
def test_copies_are_seen_as_copies(copies: tuple[int, int, int]) -> None:
    x, weight, y = 10 * MIB, 3 * MIB, 40 * MIB
    seen = sum(a * b for a, b in zip(copies, (x, weight, y), strict=True))
    plan = plan_of("forward", CASE, x, weight, y, seen + 16)
    assert plan[1:] == (*copies, 0, 16)
    assert (
        bytes_of(plan, CASE._replace(batch=64), 2 * x, weight, 2 * y)
        == sum(a * b for a, b in zip(copies, (2 * x, weight, 2 * y), strict=True)) + 16
    )


def test_a_buffer_stays_and_what_is_many_times_the_operands_grows() -> None:
    x = y = 10 * MIB
    buffer = plan_of("weight", CASE, x, 0, y, 20 * MIB + 4 * MIB)
    assert bytes_of(buffer, CASE, 2 * x, 0, 2 * y) == 44 * MIB
    transformed = plan_of("forward", CASE, x, 0, y, 140 * MIB)
    assert bytes_of(transformed, CASE, 2 * x, 0, 2 * y) == 280 * MIB


def test_a_gradient_for_every_image_grows_with_the_batch_and_the_weight() -> None:
    case, weight = Case(64, 512, 128, 28, 1), 4 * 512 * 128
    plan = plan_of("weight", case, 90 * MIB, weight, 24 * MIB, 64 * weight + 16)
    assert plan[1:] == (0, 0, 0, 1, 16)
    larger = case._replace(batch=100, inputs=256)
    assert bytes_of(plan, larger, 70 * MIB, weight // 2, 37 * MIB) == 100 * weight // 2 + 16


def test_what_is_read_is_copied_before_what_is_written() -> None:
    x = y = 10 * MIB
    assert plan_of("forward", CASE, x, MIB, y, 11 * MIB)[1:4] == (1, 1, 0)
    assert plan_of("input", CASE, x, MIB, y, 11 * MIB)[1:4] == (0, 1, 1)


def test_few_channels_are_padded_to_the_same_number() -> None:
    colours, grey = Case(16, 3, 64, 224, 7, 2), Case(16, 1, 64, 224, 7, 2)
    plan = plan_of("forward", colours, 3 * MIB, 0, 0, 8 * MIB)
    assert bytes_of(plan, colours, 3 * MIB, 0, 0) == pytest.approx(8 * MIB, rel=1e-3)
    assert bytes_of(plan, grey, MIB, 0, 0) == pytest.approx(8 * MIB, rel=1e-3)


def test_kinds_come_first() -> None:
    near, alike = Case(32, 64, 64, 56, 1), Case(2, 512, 256, 8, 5)
    rows = tuple(str(ConvolutionTiming(case, 0, 0, 0, 0, 0)) for case in (near, alike))
    assert [plan.case for plan, _ in neighbours(rows, Case(32, 64, 64, 56, 3))] == [alike]
    assert neighbours((), CASE) == ()
    assert workspace((), CASE, 1, 1, 1)[:3] == (0, 0, 3)


def test_sizes_become_cases() -> None:
    assert case_of((8, 16, 100), (32, 16, 9), dilation=4) == Case(8, 16, 32, 100, 9, dimensions=1, dilation=4)
    assert case_of((8, 16, 100), (32, 16, 1), dilation=4) == Case(8, 16, 32, 100, 1, dimensions=1)  # no holes in one
    assert case_of((8, 16, 4, 4, 4), (32, 1, 3, 3, 3), 2, 16) == Case(8, 16, 32, 4, 3, 2, 16, 3)
    assert Case(8, 16, 16, 4, 3, groups=16).kind == "depthwise"
