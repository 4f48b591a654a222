"""Cards side by side: what does not fit, speed and cost with their intervals, and the file of prices."""

from dataclasses import replace

import pytest

from hotloop.apps.simulate.compare import Row, price_of, read_prices, row_of
from hotloop.apps.simulate.simulation_record import Batch, Simulation, StepTime
from hotloop.errors import BadArgument


@pytest.mark.parametrize(
    "text",
    ['{"H200": 3.5, "t4": 0.35}', "h200,3.5\nt4,0.35\n", "card,dollars per hour\n# spot\nh200, 3.5\n\nt4,0.35"],
)
def test_prices_come_from_json_or_lines(tmp_path, text):
    path = tmp_path / "prices"
    path.write_text(text)
    assert read_prices(path) == {"h200": 3.5, "t4": 0.35}


@pytest.mark.parametrize(
    "text",
    [
        '{"h200": "dear"}',
        "h200,1,2",
        '{"h200": -1}',
        "h200,1\nt4,much",
        '{"h200": null}',
        '{"a": NaN}',
        "h200,\x1b[31m",
    ],
)
def test_a_file_that_holds_no_prices_is_an_error_in_words(tmp_path, text):
    path = tmp_path / "prices"
    path.write_text(text)
    with pytest.raises(BadArgument, match="price") as caught:
        read_prices(path)
    assert "\x1b" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_error_in_words(tmp_path):
    with pytest.raises(BadArgument, match="cannot read"):
        read_prices(tmp_path / "none")


def test_a_row_of_a_simulation_has_the_speed_and_the_cost_of_its_batch():
    found = Simulation(
        "rtx4090", 3, 3, fits=True, step_ms=StepTime(10.0, 8.0, 12.5, False), batch=Batch(8, "argument:--batch", 32)
    )
    row = row_of(found, {"nvidia rtx 4090": 0.72, "something else": 9.0})
    assert (row.samples_per_second.median, row.samples_per_second.low, row.samples_per_second.high) == (
        3200,
        2560,
        4000,
    )
    assert row.dollars_per_million.median == pytest.approx(1e6 / 3200 * 0.72 / 3600)
    assert row.dollars_per_million.low < row.dollars_per_million.median < row.dollars_per_million.high
    assert Row.from_json(row.to_json()) == row
    assert row_of(found).dollars_per_million is None
    assert row_of(replace(found, batch=None)).samples_per_second is None
    short = row_of(replace(found, fits=False))
    assert (short.step_ms, short.samples_per_second) == (None, None)


def test_a_price_is_found_however_the_card_is_spelt():
    assert price_of("a100-80", {"h200": 3.0, "NVIDIA A100-SXM4-80GB".lower(): 1.5}) == 1.5
    assert price_of("vram-8.0GiB", {"vram-8.0GiB": 1.0}) == 1.0
    assert price_of("t4", {"no such card": 1.0}) is None
