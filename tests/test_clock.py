"""`measure`: warmed up, synchronised, repeated."""

import time

import pytest
import torch

from hotloop import measure
from hotloop.device import clock
from hotloop.errors import BadArgument


class Hands:
    """A clock that only moves when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: hands.now)
    return hands


def test_it_measures_what_a_call_takes(hands: Hands) -> None:
    taken = iter([9.0, 9.0, 9.0, 0.02, 0.01, 0.05, 0.03, 0.02, 0.04])  # three to warm up, one to see how long it takes
    timing = measure(lambda: hands.pass_by(next(taken)), repeats=5)
    assert (timing.median, timing.low, timing.high) == pytest.approx((0.03, 0.012, 0.048))
    assert timing.repeats == 5
    assert timing.calls_per_repeat == 1


def test_short_calls_are_repeated_within_a_measurement(hands: Hands) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        hands.pass_by(2e-6)

    timing = measure(call, warmup=2, repeats=4)
    assert timing.calls_per_repeat == 500
    assert calls == 2 + 1 + 4 * timing.calls_per_repeat
    assert timing.median == pytest.approx(2e-6)


def test_by_the_clock_of_this_machine() -> None:
    timing = measure(lambda: time.sleep(0.02), repeats=3)
    assert 0.02 <= timing.low <= timing.median <= timing.high


@pytest.mark.parametrize("options", [{"repeats": 0}, {"repeats": -1}, {"warmup": -1}])
def test_counts_that_cannot_be_meant(options: dict[str, int]) -> None:
    with pytest.raises(BadArgument, match="at least"):
        measure(lambda: None, **options)


def test_a_result_in_place_of_a_call_is_told() -> None:
    with pytest.raises(BadArgument, match=r"a Tensor, which cannot be called\n +fix: .*measure\(lambda: model\(x\)\)"):
        measure(torch.ones(1) + 1)


@pytest.mark.gpu
def test_the_gpu_is_waited_for() -> None:
    a = torch.randn(8192, 8192, device="cuda")
    timing = measure(lambda: a @ a, device="cuda", repeats=10)
    floor = 2 * 8192**3 / 2e15  # no GPU of today does 2 PFLOP/s in fp32; queueing alone would seem to
    assert timing.median > floor
    assert timing.spread < 1
