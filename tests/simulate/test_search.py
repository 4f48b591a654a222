"""The search for the largest batch: right, and by few runs, whether or not peaks are told."""

import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.largest_batch import Outcome, SearchResult, SearchStopped, largest
from hotloop.errors import BadArgument

GIB = 2**30


def card(limit: int, base: int, each: int, *, grain: int = 1) -> Callable[[int], Outcome]:
    """Runs on a card where memory grows by `each` bytes an item, in steps of `grain`; what does not fit has no peak."""

    def run(batch: int) -> Outcome:
        peak = base + -(-batch * each // grain) * grain
        fits = peak <= limit
        return Outcome(fits, peak if fits else None, limit, "" if fits else "activations")

    return run


@given(st.integers(1, 5000), st.integers(0, 10**9), st.integers(10**4, 10**8), st.integers(1, 5000))
def test_the_answer_fits_and_little_more_does_not(batch: int, base: int, each: int, start: int) -> None:
    limit = base + batch * each + each // 2
    found = largest(card(limit, base, each), start)
    assert found.batch is not None
    assert found.batch <= batch
    assert batch - found.batch <= 0.01 * batch
    assert found.too_large is not None
    assert found.too_large > batch
    assert found.limited_by == "activations"


def test_few_runs_are_enough() -> None:
    each, base = 7 * 2**20, 3 * GIB
    runs = [
        largest(card(base + batch * each + 5, base, each, grain=2 * 2**20), start).runs
        for batch in (*range(8, 100, 3), *range(100, 4000, 157))
        for start in (1, 8, 16, 32, 64, 128, 256)
    ]
    assert max(runs) <= 12
    assert statistics.median(runs) <= 6
    assert sum(run <= 8 for run in runs) > 0.85 * len(runs)


@pytest.mark.parametrize(("lost", "median"), [(0.01, 7), (0.04, 10), (0.3, 14)])
def test_memory_that_is_lost_in_pieces_is_found_out(lost: float, median: int) -> None:
    each, base = 7 * 2**20, 3 * GIB
    runs = []
    for batch in (*range(8, 100, 7), *range(100, 4000, 357)):
        least = base + batch * each + 5
        limit = int(least / (1 - lost)) + 1  # what there is, of which some is of no use

        def run(tried: int, limit: int = limit, least: int = least) -> Outcome:
            peak = base + tried * each
            return Outcome(peak <= least, peak if peak <= least else None, limit)

        for start in (1, 8, 64, 256):
            found = largest(run, start)
            runs.append(found.runs)
            assert found.batch is not None
            assert found.batch <= batch <= 1.01 * found.batch + 1
    assert statistics.median(runs) <= median


def test_memory_that_is_full_is_not_crept_along() -> None:
    found = largest(lambda batch: Outcome(batch <= 3000, min(10**6 + 10**3 * batch, 2 * 10**6), 2 * 10**6), 512)
    assert found.batch is not None
    assert 2970 <= found.batch <= 3000
    assert found.runs <= 20


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_without_peaks_it_is_halved(batch: int, start: int, most: int) -> None:
    found = largest(lambda n: Outcome(n <= batch), start, most=most)
    right = min(batch, most)
    assert (found.batch or 0) <= right
    assert right - (found.batch or 0) <= 0.01 * right
    assert all(tried <= most for tried, _, _ in found.tried)


@given(st.integers(1, 300), st.randoms(use_true_random=False))
def test_noise_ends_and_what_is_told_was_run(batch: int, chance: random.Random) -> None:
    found = largest(lambda n: Outcome(n <= batch or chance.random() < 0.1, n * 100, batch * 100), 16)
    assert found.batch is None or (found.batch, True, found.batch * 100) in found.tried


def test_not_even_one() -> None:
    found = largest(lambda batch: Outcome(False, None, 1, "parameters"), 8)
    assert (found.batch, found.too_large, found.limited_by) == (None, 1, "parameters")
    assert found.exact
    assert SearchResult.from_json(found.to_json()) == found


def test_a_bound_may_be_what_limits() -> None:
    found = largest(lambda batch: Outcome(True, batch, 10**9), 8, most=100)
    assert (found.batch, found.too_large) == (100, None)
    assert not found.exact


@pytest.mark.parametrize(("start", "most"), [(0, None), (-1, None), (4, 0)])
def test_what_cannot_be_meant_is_refused(start: int, most: int | None) -> None:
    with pytest.raises(BadArgument):
        largest(lambda batch: Outcome(True), start, most=most)


def test_a_run_that_tells_nothing_ends_the_search_with_what_is_known() -> None:
    def run(batch: int) -> Outcome:
        if batch > 50:
            raise SearchStopped("a step never has more than 50 items", reached=50)
        return Outcome(True, 100 * batch, 10**6)

    found = largest(run, 8)
    assert (found.batch, found.too_large, found.ended) == (50, None, "a step never has more than 50 items")
    assert not found.exact
