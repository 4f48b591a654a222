"""Numbers and foreign strings as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.printing.text import count, duration, plural, printable, shorten, size


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (None, "unknown"),
    ],
)
def test_size(given_: int | None, expected: str) -> None:
    assert size(given_) == expected


@given(st.floats(min_value=1e-9, max_value=1e7))
def test_every_duration_has_a_unit(seconds: float) -> None:
    assert duration(seconds).split()[1] in {"µs", "ms", "s", "min", "h"}


@given(st.floats(min_value=0, max_value=1e12))
def test_count_keeps_the_magnitude(n: float) -> None:
    assert math.isclose(float(count(n).replace(",", "")), n, rel_tol=0.01)


def test_plural_and_shorten() -> None:
    assert [plural(n, "batch", "batches") for n in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
    assert shorten(["a"]) == "a"


@given(st.text())
def test_nothing_from_outside_steers_the_terminal(foreign: str) -> None:
    assert printable(foreign).isprintable() or not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in printable(foreign))
    assert "\x1b" not in printable(foreign + "\x1b[2J\r\n")
    assert len(printable(foreign + "\u2028\u2029").splitlines()) == 1
