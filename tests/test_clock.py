"""`measure`: warmed up, synchronised, repeated."""

import time

import pytest
import torch

from hotloop import measure
from hotloop.errors import BadArgument


def test_it_measures_what_a_call_takes() -> None:
    timing = measure(lambda: time.sleep(0.02), repeats=5)
    assert 0.02 <= timing.low <= timing.median <= timing.high < 0.1
    assert timing.repeats == 5
    assert timing.calls_per_repeat == 1


def test_short_calls_are_repeated_within_a_measurement() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    timing = measure(call, warmup=2, repeats=4)
    assert timing.calls_per_repeat > 100
    assert calls == 2 + 1 + 4 * timing.calls_per_repeat
    assert timing.median < 1e-4


@pytest.mark.parametrize("options", [{"repeats": 0}, {"repeats": -1}, {"warmup": -1}])
def test_counts_that_cannot_be_meant(options: dict[str, int]) -> None:
    with pytest.raises(BadArgument, match="at least"):
        measure(lambda: None, **options)


@pytest.mark.gpu
def test_the_gpu_is_waited_for() -> None:
    a = torch.randn(8192, 8192, device="cuda")
    timing = measure(lambda: a @ a, device="cuda", repeats=10)
    floor = 2 * 8192**3 / 2e15  # no GPU of today does 2 PFLOP/s in fp32; queueing alone would seem to
    assert timing.median > floor
    assert timing.spread < 1
