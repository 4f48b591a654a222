"""Fitting: made-up GPUs are found again, and measurements that went wrong do not matter."""

import doctest
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import calibration_fit
import calibration_observe
from calibration_fit import Sample, fit, fit_cache, minimise, spread
from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.cost import seconds
from hotloop.apps.simulate.products import Product
from hotloop.apps.simulate.table import Curve
from hotloop.apps.simulate.work import WorkPart

from ..thorough import tries

H200 = card("h200")
FLOOR = 1.5e-6
SIDES = (64, 256, 640, 1280, 2560, 5120)
SHAPES = [(1, m, n, k) for m in SIDES for n in (128, 1280, 5120) for k in (64, 640, 5120)]
MEMORY = [WorkPart("pointwise", bytes=float(2**power)) for power in range(10, 33)]


@pytest.mark.parametrize("module", [calibration_fit, calibration_observe])
def test_its_examples_are_right(module) -> None:
    assert doctest.testmod(module).failed == 0


def gemm(count: int, rows: int, columns: int, inner: int) -> WorkPart:
    product = Product(count, rows, columns, inner)
    return WorkPart("gemm", 2.0 * (rows * columns + (rows + columns) * inner), product.flops, "bf16", product=product)


GEMMS = [gemm(*shape) for shape in SHAPES]


def made_up(parts: list[WorkPart], curve: Curve, cache: float = 2.0, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    dice = np.random.default_rng(seed)
    return [
        Sample(part, seconds(part, H200, curve, floor=FLOOR, cache=cache) * float(np.exp(noise * dice.normal())))
        for part in parts
    ]


def errors(curve: Curve, truth: list[Sample]) -> list[float]:
    return [abs(seconds(s.part, H200, curve, floor=FLOOR, cache=2.0) / s.seconds - 1) for s in truth]


latencies = st.floats(1.6e-6, 2e-5)
shares = st.floats(0.1, 0.95)


@settings(max_examples=tries(8, 20), deadline=None)
@given(latencies, shares)
def test_what_memory_bounds_is_found_again(latency, memory):
    truth = Curve(latency, memory)
    found = fit(made_up(MEMORY, truth), H200, floor=FLOOR, cache=2.0)
    assert found.memory == pytest.approx(memory, rel=0.03)
    assert found.latency == pytest.approx(latency, rel=0.05)
    assert found.spread <= 0.021
    assert found.samples == len(MEMORY)


@settings(max_examples=tries(1, 5), deadline=None)
@given(latencies, shares, st.floats(0.1, 0.9), st.sampled_from([1.0, 4.0]), st.sampled_from([1024.0, 4096.0]))
def test_products_are_found_again(latency, memory, compute, sharpness, tile):
    truth = made_up(GEMMS, Curve(latency, memory, compute, sharpness, tile))
    found = fit(truth, H200, floor=FLOOR, cache=2.0)
    assert max(errors(found, truth)) < 0.1
    assert found.compute == pytest.approx(compute, rel=0.1)


@settings(max_examples=5, deadline=None)
@given(shares, st.integers(0, 99))
def test_outliers_do_not_matter(memory, seed):
    truth = made_up(MEMORY * 2, Curve(4e-6, memory))
    noisy = made_up(MEMORY * 2, Curve(4e-6, memory), noise=0.03, seed=seed)
    spoilt = [replace(s, seconds=s.seconds * 20) if n % 8 == 3 else s for n, s in enumerate(noisy)]
    found = fit(spoilt, H200, floor=FLOOR, cache=2.0)
    assert np.median(errors(found, truth)) < 0.1


def test_the_spread_is_that_of_the_noise():
    samples = made_up(MEMORY * 10, Curve(4e-6, 0.8), noise=0.15)
    assert fit(samples, H200, floor=FLOOR, cache=2.0).spread == pytest.approx(0.15, rel=0.25)


@pytest.mark.parametrize("cache", [1.0, 2.0, 3.0])
def test_the_cache_is_found_again(cache):
    assert fit_cache(made_up(MEMORY, Curve(3e-6, 0.8), cache=cache), H200, floor=FLOOR) == cache


def test_two_measurements_give_some_curve():
    samples = made_up(MEMORY[:2], Curve(4e-6, 0.8))
    assert fit(samples, H200, floor=FLOOR, cache=2.0).memory > 0


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=3))
@example([0.35])  # in the middle of the first two points
def test_the_least_of_a_bowl_is_its_bottom(bottom):
    target = np.array(bottom)
    found = minimise(lambda x: float(((x - target) ** 2).sum()), np.zeros(len(bottom)))
    assert np.allclose(found, target, atol=1e-3)


@given(st.integers(0, 5))
def test_the_spread_is_a_standard_deviation(seed):
    assert spread(np.random.default_rng(seed).normal(size=4000) * 0.3) == pytest.approx(0.3, rel=0.1)
