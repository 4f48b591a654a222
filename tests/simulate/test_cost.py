"""Seconds of a part: monotone in size and in what the card can do, never under the floor, near known figures."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.cards import card, cards
from hotloop.apps.simulate.cost import cache_of, peak, seconds_of
from hotloop.apps.simulate.families import FAMILIES
from hotloop.apps.simulate.products import Product
from hotloop.apps.simulate.table import ArchitectureTable, Curve, default_table, load
from hotloop.apps.simulate.work import WorkPart

H200 = card("h200")
TABLE = default_table()
precisions = st.sampled_from(["fp32", "tf32", "fp16", "bf16", "fp8", "fp64"])
sides = st.integers(1, 20_000)


def product_part(
    count: int, rows: int, columns: int, inner: int, precision: str = "bf16", family: str = "gemm"
) -> WorkPart:
    product = Product(count, rows, columns, inner)
    size = 2.0 * count * (rows * columns + rows * inner + inner * columns)
    return WorkPart(family, size, product.flops, precision, product=product)


parts = st.builds(
    WorkPart,
    family=st.sampled_from(FAMILIES),
    bytes=st.floats(0, 1e11),
    flops=st.floats(0, 1e15),
    precision=precisions,
    kernels=st.integers(1, 1000),
    layout=st.sampled_from(["", "contiguous", "channels_last"]),
)
everywhere = st.sampled_from(cards())


@given(parts, everywhere, st.floats(1, 100))
def test_more_work_is_never_quicker(part, on, factor):
    now = seconds_of(part, on, TABLE)
    slack = 1 + 1e-9
    assert seconds_of(replace(part, bytes=part.bytes * factor), on, TABLE) * slack >= now
    assert seconds_of(replace(part, flops=part.flops * factor), on, TABLE) * slack >= now
    assert seconds_of(replace(part, kernels=part.kernels * 2), on, TABLE) >= now


@given(
    st.integers(1, 64), sides, sides, sides, precisions, everywhere, st.sampled_from([0, 1, 2, 3]), st.integers(1, 999)
)
def test_a_larger_product_is_never_quicker(count, rows, columns, inner, precision, on, which, more):
    small = [count, rows, columns, inner]
    large = list(small)
    large[which] += more
    quick, slow = (seconds_of(product_part(*shape, precision), on, TABLE) for shape in (small, large))
    assert slow * (1 + 1e-9) >= quick


@given(parts, everywhere, st.floats(1, 10))
def test_a_better_card_is_never_slower(part, on, factor):
    now = seconds_of(part, on, TABLE) * (1 + 1e-9)
    assert seconds_of(part, replace(on, bandwidth=on.bandwidth * factor), TABLE) <= now
    faster = {name: rate * factor for name, rate in on.peaks.items()}
    assert seconds_of(part, replace(on, peaks=faster), TABLE) <= now


@given(parts, everywhere)
def test_nothing_is_quicker_than_its_launches_or_than_the_card(part, on):
    taken = seconds_of(part, on, TABLE)
    assert taken >= TABLE.floor * part.kernels
    assert taken * (1 + 1e-9) >= part.bytes / (on.bandwidth * TABLE.cache)
    assert taken * (1 + 1e-9) >= part.flops / peak(on, part.precision)


def test_figures_measured_on_an_h200_are_met_roughly_even_without_calibration():
    large = product_part(1, 8192, 8192, 8192)
    assert large.flops / seconds_of(large, H200, TABLE) == pytest.approx(783e12, rel=0.15)
    moved = WorkPart("copy", bytes=2**31)
    assert moved.bytes / seconds_of(moved, H200, TABLE) == pytest.approx(4.3e12, rel=0.25)


def test_what_fits_into_the_cache_is_quicker():
    small, large = WorkPart("pointwise", bytes=cache_of(H200) / 8), WorkPart("pointwise", bytes=cache_of(H200) * 8)
    free = replace(TABLE, floor=0.0, curves={"pointwise": Curve(latency=0.0, memory=0.8)})
    assert seconds_of(large, H200, free) > 1.5 * 64 * seconds_of(small, H200, free)


def test_a_product_that_just_misses_a_wave_pays_for_a_whole_one():
    rows = 128 * H200.sms
    full, over = product_part(1, rows, 256, 4096), product_part(1, rows + 1, 256, 4096)
    assert seconds_of(over, H200, TABLE) > 1.1 * seconds_of(full, H200, TABLE)


def test_a_skinny_product_is_far_from_the_peak():
    skinny = product_part(1, 16, 4096, 4096)
    assert skinny.flops / seconds_of(skinny, H200, TABLE) < 0.2 * H200.peaks["bf16"]


def test_what_a_card_lacks_is_done_in_what_it_has():
    t4 = card("t4")
    assert peak(t4, "tf32") == peak(t4, "fp32") == t4.peaks["fp32"]
    assert peak(t4, "fp8") > 0
    assert peak(H200, "fp64") > peak(card("rtx4090"), "fp64")


def test_a_curve_that_is_missing_is_the_next_of_kin_or_the_default():
    own = ArchitectureTable(card="h200", curves={"gemm/bf16": Curve(latency=1e-6, memory=0.9, compute=0.7)})
    assert own.curve(WorkPart("gemm", precision="fp16")).compute == 0.7
    assert own.curve(WorkPart("norm")) == TABLE.curve(WorkPart("norm"))


def test_a_table_comes_back_from_json():
    assert ArchitectureTable.from_json(TABLE.to_json()) == TABLE


@pytest.mark.parametrize("table", [TABLE, load("hopper")], ids=["default", "hopper"])
def test_tables_of_times_are_sound(table):
    assert table.is_sound()
    for curve in table.curves.values():
        assert min(curve.memory, curve.compute, curve.sharpness) > 0
        assert min(curve.latency, curve.spread) >= 0
    for key, near in table.nearby.items():
        assert key in table.curves
        assert near.reach > 0
        assert len(near.places) == len(near.weights)


def test_a_kernel_takes_at_least_the_time_between_two():
    slow = replace(TABLE, floor=1e-3)
    assert seconds_of(WorkPart("pointwise", bytes=4.0, kernels=3), H200, slow) == 3e-3
