"""What turns say of a fix."""

import pytest

from hotloop.apps.doctor.diagnosis import CHANCE, Gain, Turn, chance


def turns(*steps: float, memory: int | None = None) -> tuple[Turn, ...]:
    return tuple(Turn(step, (1.0,), memory) for step in steps)


@pytest.mark.parametrize(
    ("before", "after", "faster", "undecided"),
    [
        ((2.0, 2.1, 2.2), (1.0, 1.1, 1.2), True, False),
        ((2.0, 2.1, 2.2), (1.0, 1.1, 2.05), False, True),
        ((2.0, 2.1, 2.2, 2.0, 2.1), (1.0, 1.1, 2.05, 1.0, 1.1), True, False),
        ((1.01, 1.012, 1.014), (1.0, 1.001, 1.002), False, False),  # every turn is faster, and it is worth nothing
        ((1.0, 1.1, 1.2), (2.0, 2.1, 2.2), False, False),
        ((2.0,), (1.0,), False, True),  # one turn proves nothing
    ],
)
def test_faster_means_by_more_than_the_noise(before, after, faster: bool, undecided: bool) -> None:
    gain = Gain(turns(*before), turns(*after))
    assert (gain.is_faster, gain.is_undecided) == (faster, undecided)
    assert gain.is_slower is (before == (1.0, 1.1, 1.2))


def test_the_chance_is_that_of_every_order() -> None:
    assert chance([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]) == 1
    assert chance([4, 5, 6], [1, 2, 3]) == pytest.approx(1 / 20)
    assert chance([1, 2, 3], [4, 5, 6]) == 1
    assert chance([5, 6, 7, 8, 4.5], [1, 2, 3, 4, 6.5]) <= CHANCE


def test_memory_counts_where_it_is_known() -> None:
    gain = Gain(turns(1.0, 1.0, 1.0, memory=100), turns(1.3, 1.3, 1.3, memory=80))
    assert gain.is_smaller
    assert str(gain) == "20% less memory, 1.30× as slow"
    assert not gain.helps  # what it saves it costs elsewhere
    assert Gain(turns(1.0, 1.0, 1.0, memory=100), turns(1.01, 1.0, 0.99, memory=80)).helps
    assert not Gain(turns(1.0, 1.0, 1.0), turns(1.0, 1.0, 1.0)).is_smaller
