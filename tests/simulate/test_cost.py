"""Seconds of a part: monotone in size and in what the card can do, never under the floor, near known figures."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.cards import card, cards
from hotloop.apps.simulate.cost import cache_of, peak, seconds_of
from hotloop.apps.simulate.families import FAMILIES
from hotloop.apps.simulate.products import Product
from hotloop.apps.simulate.table import ArchitectureTable, Curve, default_table, load, parse
from hotloop.apps.simulate.work import Part
from hotloop.errors import BadArgument

H200 = card("h200")
TABLE = default_table()
precisions = st.sampled_from(["fp32", "tf32", "fp16", "bf16", "fp8", "fp64"])
sides = st.integers(1, 20_000)


def product_part(
    count: int, rows: int, columns: int, inner: int, precision: str = "bf16", family: str = "gemm"
) -> Part:
    product = Product(count, rows, columns, inner)
    size = 2.0 * count * (rows * columns + rows * inner + inner * columns)
    return Part(family, size, product.flops, precision, product=product)


parts = st.builds(
    Part,
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
    moved = Part("copy", bytes=2**31)
    assert moved.bytes / seconds_of(moved, H200, TABLE) == pytest.approx(4.3e12, rel=0.25)


def test_what_fits_into_the_cache_is_quicker():
    small, large = Part("pointwise", bytes=cache_of(H200) / 8), Part("pointwise", bytes=cache_of(H200) * 8)
    free = replace(TABLE, floor=0.0, curves={"pointwise": Curve(latency=0.0, memory=0.8).to_json()})
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


@given(st.text(max_size=20))
def test_any_name_of_an_architecture_has_a_table(name):
    assert load(name).curve(Part("gemm")).compute > 0


def test_a_curve_that_is_missing_is_the_next_of_kin_or_the_default():
    own = ArchitectureTable(card="h200", curves={"gemm/bf16": Curve(latency=1e-6, memory=0.9, compute=0.7).to_json()})
    assert own.curve(Part("gemm", precision="fp16")).compute == 0.7
    assert own.curve(Part("norm")) == TABLE.curve(Part("norm"))


def test_a_table_comes_back_from_json():
    assert parse(TABLE.to_json(), "again") == TABLE


@pytest.mark.parametrize("data", [[], {"curves": {"gemm": {"latency": 1}}}, {"curves": {"gemm": 3}}])
def test_what_is_no_table_is_an_error_in_words(data):
    with pytest.raises(BadArgument, match=r"table\.json"):
        parse(data, "table.json")


def test_a_kernel_takes_at_least_the_time_between_two():
    slow = replace(TABLE, floor=1e-3)
    assert seconds_of(Part("pointwise", bytes=4.0, kernels=3), H200, slow) == 3e-3
