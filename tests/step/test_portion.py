"""`Portion`: it settles, it grows back, and it never goes to and fro."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.step.portion import GOOD_PASSES, MOST_GOOD_PASSES, Portion

from ..thorough import tries


class Device:
    """Memory for so many items at once, which changes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def step(self, portion: Portion, items: int) -> int:
        """One step; the failures in it."""
        failures = 0
        while (size := portion.of(items)) > self.capacity:
            assert size > 1, "a single item"
            portion.failed(size)
            failures += 1
        portion.went_well()
        return failures


def test_halves_until_it_fits_and_remembers() -> None:
    device = Device(10)
    portion = Portion()
    assert device.step(portion, 64) == 3
    assert portion.limit == 8
    assert portion.failures == 3
    assert [device.step(portion, 64) for _ in range(GOOD_PASSES - 1)] == [0] * (GOOD_PASSES - 1)
    assert portion.limit == 16, "a try"
    assert device.step(portion, 64) == 1
    assert portion.limit == 8, "back to what was good, not to less"


@settings(deadline=None, max_examples=tries(8, 60))
@given(st.integers(1, 64), st.integers(1, 200))
def test_tries_become_rare(capacity: int, items: int) -> None:
    device = Device(capacity)
    portion = Portion()
    steps = 20_000
    failures = sum(device.step(portion, items) for _ in range(steps))
    settling, doublings = items.bit_length(), (MOST_GOOD_PASSES // GOOD_PASSES).bit_length()
    assert failures <= settling + doublings + steps // MOST_GOOD_PASSES
    late = sum(device.step(portion, items) for _ in range(steps))
    assert late <= 1 + steps // MOST_GOOD_PASSES, "and rarer still"


@settings(deadline=None, max_examples=tries(10, 30))
@given(st.integers(0, 2**32))
def test_changing_memory_costs_failures_only_where_it_changes(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311
    device = Device(dice.randint(1, 64))
    portion = Portion()
    changes = 20
    failures = 0
    for _ in range(changes):
        device.capacity = dice.randint(1, 64)
        failures += sum(device.step(portion, 64) for _ in range(400))
    per_change = 6 + 3  # settling, and tries
    assert failures <= changes * per_change
    device.capacity = 100
    for _ in range(20 * MOST_GOOD_PASSES):
        device.step(portion, 64)
        if portion.limit is None:
            return
    pytest.fail(f"seed {seed}: it did not grow back")


def test_the_most_is_never_exceeded() -> None:
    device = Device(5)
    portion = Portion(most=12)
    assert portion.of(64) == 12
    device.step(portion, 64)
    assert portion.limit == 3
    device.capacity = 100
    for _ in range(500):
        device.step(portion, 64)
        assert portion.of(64) <= 12
    assert portion.limit == 12


def test_whole_batches_again_and_not_tight_for_ever() -> None:
    device = Device(10)
    portion = Portion()
    assert not portion.is_tight
    device.step(portion, 16)
    assert portion.is_tight
    device.capacity = 16
    for _ in range(2 * GOOD_PASSES):
        device.step(portion, 16)
    assert portion.limit is None
    assert portion.is_tight, "it may still be that it was luck"
    for _ in range(MOST_GOOD_PASSES):
        device.step(portion, 16)
    assert not portion.is_tight


def test_it_goes_on_from_what_it_has_learnt() -> None:
    device = Device(10)
    portion = Portion()
    for _ in range(70):
        device.step(portion, 64)
    again = Portion()
    again.load_state_dict(portion.state_dict())
    for _ in range(300):
        assert device.step(portion, 64) == device.step(again, 64)
        assert portion.limit == again.limit


def test_what_an_earlier_version_had_not_learnt_is_as_at_first() -> None:
    portion = Portion()
    portion.failed(64)
    state = portion.state_dict()
    del state["cuts"]
    again = Portion()
    again.load_state_dict(state)
    assert (again.limit, again.failures, again.cuts) == (32, 1, 0)
