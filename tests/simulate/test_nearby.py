"""Corrections of curves: near what was measured they follow it, far away they leave the curve alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration_fit import interpolate
from hotloop.apps.simulate.nearby import Nearby

PLACES = [(2**rows, 2**columns) for rows in range(4, 12) for columns in range(4, 12)]


def bent(place: tuple[int, ...]) -> float:
    """A smooth deviation, as no curve of a rate and a latency has it."""
    rows, columns = np.log2(place)
    return 0.5 * float(np.sin(rows / 2)) + 0.2 * float(np.cos(columns / 2))


def found(places: list[tuple[int, ...]]) -> tuple[Nearby, np.ndarray]:
    off = np.array([bent(place) for place in places])
    nearby, left = interpolate(places, off, np.ones(len(places)))
    assert nearby is not None
    return nearby, left


def test_what_was_not_measured_is_foretold_from_its_neighbours():
    nearby, left = found(PLACES)
    assert np.median(np.abs(left)) < 0.05
    between = [(3 * 2**power, 3 * 2**power) for power in range(5, 9)]
    assert [nearby.correction(place) for place in between] == pytest.approx([bent(place) for place in between], abs=0.1)


@given(st.integers(0, 63))
@settings(max_examples=10, deadline=None)
def test_the_error_without_a_sample_is_that_of_a_fit_without_it(which):
    nearby, left = found(PLACES)
    others = [place for number, place in enumerate(PLACES) if number != which]
    again, _ = found(others)
    if again.reach == nearby.reach:
        assert bent(PLACES[which]) - again.correction(PLACES[which]) == pytest.approx(left[which], abs=0.02)


def test_far_away_the_curve_is_left_alone():
    nearby, _ = found(PLACES)
    assert abs(nearby.correction((2**40, 2**40))) < 1e-6


def test_noise_is_no_reason_to_correct():
    dice = np.random.default_rng(0)
    off = dice.normal(size=len(PLACES)) * 0.05
    _, left = interpolate(PLACES, off, np.ones(len(PLACES)))
    assert np.mean(np.abs(left)) <= np.mean(np.abs(off))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=5), st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)))
def test_a_correction_stays_within_reason(weights, traits):
    places = tuple((2**number, 1) for number in range(len(weights)))
    assert abs(Nearby(1.0, places, tuple(weights)).correction(traits)) <= 1.5


def test_operations_with_other_traits_are_left_alone():
    assert Nearby(1.0, ((2, 3),), (0.5,)).correction((2, 3, 4)) == 0.0
    assert interpolate([(1,), (2,)], np.zeros(2), np.ones(2))[0] is None
