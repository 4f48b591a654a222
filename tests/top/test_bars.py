"""Bars and sparklines: exact widths, honest levels, and blanks where nothing is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.top.bars import LEVELS, bar, gauge, past, rule, slices, sparkline
from hotloop.apps.top.history import History
from hotloop.monitor.reading import Host, Reading

ANY = st.one_of(st.none(), st.floats())


@given(ANY, st.integers(-2, 300))
def test_a_bar_is_as_wide_as_asked_for(percent: float | None, cells: int) -> None:
    assert bar(percent, cells).cell_len == max(cells, 0)


@given(st.floats(0, 100), st.floats(0, 100))
def test_more_is_never_shorter(one: float, other: float) -> None:
    low, high = (bar(percent, 20).plain.rstrip("░") for percent in sorted((one, other)))
    assert len(low) <= len(high)


@pytest.mark.parametrize(
    ("percent", "drawn"),
    [(0, "░░░░"), (50, "██░░"), (100, "████"), (1e9, "████"), (-5, "░░░░"), (None, "–   "), (float("nan"), "–   ")],
)
def test_what_a_bar_looks_like(percent: float | None, drawn: str) -> None:
    assert bar(percent, 4).plain == drawn


@given(st.lists(ANY, max_size=50), ANY)
def test_a_sparkline_has_a_cell_for_each_value(values: list[float | None], most: float | None) -> None:
    drawn = sparkline(values, most)
    assert len(drawn) == len(values)
    assert set(drawn) <= {*LEVELS, " "}
    assert all(cell == " " for cell, value in zip(drawn, values, strict=True) if value is None)


def test_a_known_zero_is_not_an_unknown() -> None:
    assert sparkline([0, None, 100]) == "▁ █"


def test_slices_cover_the_time_up_to_now() -> None:
    times = [float(second) for second in range(100, 160)]
    assert slices(times, times, 60, now=159.0) == times
    assert slices(times, times, 30, now=159.0) == [second + 0.5 for second in times[::2]]
    assert slices(times, times, 120, now=159.5)[-4:] == [158.0, 158.0, 159.0, 159.0]


def test_a_curve_moves_and_does_not_change_its_shape() -> None:
    times = [1000 + 0.97 * sample for sample in range(60)]
    values = [float(sample % 7) for sample in range(60)]
    before = slices(times[:50], values[:50], 30, now=times[49])
    after = slices(times, values, 30, now=times[59])
    moved = int(times[59] // 2) - int(times[49] // 2)
    assert after[5 : 29 - moved] == before[5 + moved : 29]


def test_a_gap_stays_a_gap() -> None:
    times = [0.0, 1.0, 2.0, 20.0, 21.0]
    drawn = slices(times, [5.0] * 5, 60, now=21.0)
    assert [value is None for value in drawn[-22:]] == [False] * 4 + [True] * 16 + [False] * 2


def test_what_was_not_known_is_blank() -> None:
    assert slices([0.0, 1.0], [None, None], 4, now=1.0) == [None] * 4
    assert slices([], [], 4, now=1.0) == [None] * 4


@given(st.integers(1, 200))
def test_one_sample_is_no_curve(cells: int) -> None:
    history = History(60)
    history.add(Reading(0.0, Host(cpu=50.0)))
    assert past(history, history.host("cpu"))(cells) == " " * cells
    history.add(Reading(1.0, Host(cpu=50.0)))
    assert past(history, history.host("cpu"))(cells).strip()


@given(st.text(max_size=30), st.text(max_size=30), st.integers(0, 300))
def test_no_line_is_wider_than_asked_for(title: str, stats: str, width: int) -> None:
    title, stats = (text if text.isprintable() else "" for text in (title, stats))
    assert rule(title, width, stats).cell_len <= width
    assert gauge(title, 40, stats, "x".__mul__, width).cell_len <= width
