"""Records go to JSON and come back equal."""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hotloop import Loop
from hotloop.records import Epoch, Report, Timing, epochs_table
from hotloop.records.files import write_json

numbers = st.floats(allow_nan=False, allow_infinity=False)
names = st.dictionaries(st.text(max_size=5), numbers, max_size=3)
epochs = st.builds(
    Epoch, number=st.integers(1), loss=numbers, items=st.integers(0), seconds=numbers, losses=names, metrics=names
)
reports = st.builds(
    Report,
    steps=st.integers(0),
    skipped=st.integers(0),
    seconds=numbers,
    parameters=st.integers(0),
    epochs=st.lists(epochs, max_size=3).map(tuple),
    curve=st.lists(st.tuples(st.integers(), numbers), max_size=3).map(tuple),
    peak_memory=st.none() | st.integers(0),
    versions=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)


@given(reports)
def test_a_report_comes_back_equal(report: Report) -> None:
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


@given(reports)
def test_fields_of_a_later_version_are_passed_over(report: Report) -> None:
    assert Report.from_json({**report.to_json(), "invented_later": 1}) == report


def test_spread_and_rates_of_nothing_are_nothing() -> None:
    assert Timing(0.0, 0.0, 0.0, 1, 1, "cpu").spread == 0.0
    assert Epoch(1, 0.0, 10, 0.0, {}, {}).items_per_second == 0.0


def test_a_report_is_printed_as_a_summary(task: Any) -> None:
    """`print(loop.fit(…))`, and the last line of a notebook's cell."""
    model = nn.Linear(task.inputs.shape[1], 3)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu", plan="plain")
    report = loop.fit(task.loader(16), epochs=3, validate=task.loader(16), progress=False)
    first, loss, speed = str(report).splitlines()
    assert re.fullmatch(r"3 epochs \(\d+ steps\) in \S+ \S+ on cpu \(.+\): fp32", first)
    assert re.fullmatch(r"loss \S+ → \S+; validation: loss \S+", loss)
    assert speed.endswith(" items/s")
    assert repr(report) == str(report)


def test_what_is_not_a_number_comes_back_from_a_file(tmp_path: Path) -> None:
    epoch = Epoch(1, math.nan, 8, 0.5, {}, {"distance": math.inf, "f1": 0.5})
    write_json(tmp_path / "epoch.json", epoch.to_json())
    again = Epoch.from_json(json.loads((tmp_path / "epoch.json").read_text()))
    assert math.isnan(again.loss)
    assert math.isnan(again.metrics["distance"])
    assert again.metrics["f1"] == 0.5
    assert "nan" in epochs_table([again])
