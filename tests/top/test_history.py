"""`History`: bounded, merged, and not broken by clocks, sleep or GPUs that come and go."""

import math
import pickle
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.apps.top.history import History
from hotloop.errors import BadArgument
from hotloop.monitor.reading import GPU_FIELDS, HOST_FIELDS, Gpu, Host, Reading

from ..thorough import tries


def at(time: float, utilisation: float | None = 50.0, *, index: int = 0, cpu: float | None = 10.0) -> Reading:
    return Reading(time, Host(cpu=cpu), (Gpu(index, "GPU", utilisation=utilisation, memory_used=int(time)),))


def test_old_samples_leave() -> None:
    history = History(seconds=10)
    for second in range(100):
        history.add(at(float(second), float(second)))
    assert history.times == [float(second) for second in range(89, 100)]
    assert history.gpu(0, "utilisation") == history.times
    assert history.host("cpu") == [10.0] * 11


def test_quick_samples_are_merged_by_their_mean_or_the_latest() -> None:
    history = History(seconds=60, every=1.0)
    for number, utilisation in enumerate([10.0, 20.0, 60.0, None]):
        history.add(at(100 + number * 0.25, utilisation))
    history.add(Reading(101.0, Host(), (Gpu(0, "GPU", utilisation=5.0, memory_used=7),)))
    assert history.times == [100.0, 101.0]
    assert history.gpu(0, "utilisation") == [30.0, 5.0]  # what was not known does not count as 0
    assert history.gpu(0, "memory_used") == [100.0, 7.0]
    assert history.host("cpu") == [10.0, None]


def test_a_timer_that_comes_a_little_early_still_gives_one_sample_each() -> None:
    history = History(seconds=60, every=1.0)
    for second in range(10):
        history.add(at(second - 0.04 * (second % 2)))
    assert len(history) == 10


def test_gpus_come_and_go() -> None:
    history = History(seconds=60)
    history.add(at(0.0, 1.0, index=0))
    history.add(at(1.0, 2.0, index=3))
    history.add(Reading(2.0, Host()))
    assert history.indices == [0, 3]
    assert history.gpu(0, "utilisation") == [1.0, None, None]
    assert history.gpu(3, "utilisation") == [None, 2.0, None]
    assert history.gpu(7, "utilisation") == [None, None, None]
    for second in range(100, 170):
        history.add(at(float(second), index=3))
    assert history.indices == [3]


def test_a_clock_set_back_takes_the_samples_along() -> None:
    history = History(seconds=60)
    for second in range(30):
        history.add(at(10_000.0 + second, float(second)))
    history.add(at(500.0, 99.0))
    assert history.gpu(0, "utilisation") == [*map(float, range(30)), 99.0]
    assert history.times == sorted(history.times)
    assert history.times[-1] == 500.0
    assert history.times[0] > 500.0 - 60


def test_a_laptop_that_slept_begins_anew() -> None:
    history = History(seconds=60)
    for time in (0.0, 1.0, 2.0, 30_000.0, 30_001.0):
        history.add(at(time))
    assert history.times == [30_000.0, 30_001.0]


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60),
    st.floats(0.01, 100).flatmap(lambda every: st.tuples(st.just(every), st.floats(every, every * 20))),
)
@settings(deadline=None)
def test_any_clock_gives_rising_times_inside_the_window(times: list[float], lengths: tuple[float, float]) -> None:
    every, seconds = lengths
    history = History(seconds, every)
    for time in times:
        history.add(at(time))
    kept = history.times
    assert kept == sorted(kept)
    assert kept[-1] <= times[-1]
    assert kept[0] >= times[-1] - seconds - 1e-6
    assert 1 <= len(kept) <= math.ceil(seconds / every / 0.9) + 1
    assert len(history.gpu(0, "utilisation")) == len(history.host("cpu")) == len(kept)


def test_hours_at_two_samples_a_second_take_no_more_memory_than_the_first_minutes() -> None:
    history = History(seconds=600, every=1.0)
    sizes = []
    reading = at(0.0)
    samples = tries(4, 24) * 3600 * 2
    for number in range(samples):
        object.__setattr__(reading, "time", number / 2)  # a copy each would take longer than all the rest
        history.add(reading)
        if number in (1200, samples - 1):
            sizes.append(len(pickle.dumps(history)))
    assert len(history) == 600
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
    assert sizes[1] < 600 * 1024


def test_it_may_be_read_while_it_is_filled() -> None:
    history = History(seconds=20)
    done = threading.Event()
    failures: list[Exception] = []

    def read() -> None:
        try:
            while not done.is_set():
                history.gpu(0, "utilisation"), history.times, history.indices
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for second in range(2000):
        history.add(at(float(second), index=second % 5))
    done.set()
    reader.join()
    assert not failures


def test_every_number_of_a_reading_has_a_history() -> None:
    history = History(seconds=1)
    history.add(at(0.0))
    assert {len(history.gpu(0, name)) for name in GPU_FIELDS} == {1}
    assert {len(history.host(name)) for name in HOST_FIELDS} == {1}
    assert "energy" in GPU_FIELDS
    assert "name" not in GPU_FIELDS


@pytest.mark.parametrize(("seconds", "every"), [(0, 1), (10, 0), (10, -1), (1, 2), (math.inf, 1), (math.nan, 1)])
def test_lengths_that_cannot_be_meant(seconds: float, every: float) -> None:
    with pytest.raises(BadArgument):
        History(seconds, every)


def test_a_field_that_does_not_exist() -> None:
    with pytest.raises(BadArgument, match=r"utilization(.|\n)*choose one of: utilisation"):
        History(10).gpu(0, "utilization")
