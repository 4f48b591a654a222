"""What recurrent networks take, beside what was measured of them on an H200."""

import ast
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.library_memory import constants_for
from hotloop.apps.simulate.need import PROCESS, RESULT, Need
from hotloop.apps.simulate.workspaces import needs

H200 = card("h200")
RAW = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "memory_calibration_h200.json.gz"
WHAT = re.compile(r"recurrent (\w+) (\(.*?\)) (\d) layers both=(\w+) dropout=(.*)")
MODES = {"rnn": 1, "lstm": 2, "gru": 3}


def taken(ran: Operation) -> tuple[Need, ...]:
    """What an operation needs on an H200."""
    return needs(ran, H200, constants_for(H200, "2.11"))


def operation(cell: str, shape: tuple[int, ...], layers: int, **arguments: Any) -> Operation:
    batch, length, inputs, width = shape
    x = Shape((length, batch, inputs), "float32", 4)
    settings = {"mode": MODES[cell], "hidden_size": width, "num_layers": layers, "train": True, **arguments}
    return Operation("aten._cudnn_rnn.default", (x,), (x,), settings)


def lasting(found: tuple[Need, ...], how: str) -> int:
    return sum(need.bytes for need in found if need.lasting == how)


def measured() -> list[tuple[Operation, dict[str, int]]]:
    rows = json.loads(gzip.decompress(RAW.read_bytes()))["rows"]
    found = []
    for row in rows:
        if words := WHAT.match(row["what"]):
            cell, shape, layers, both, dropout = words.groups()
            settings = {"bidirectional": both == "True", "dropout": float(dropout)}
            found.append((operation(cell, ast.literal_eval(shape), int(layers), **settings), row))
    return found


def test_the_formulas_give_what_was_measured() -> None:
    rows = [(ran, row) for ran, row in measured() if ran.arguments["mode"] != MODES["rnn"]]  # no formula is known
    assert len(rows) >= 100
    exact = []
    for ran, row in rows:
        batch = ran.inputs[0].sizes[1]
        states = (2 if ran.arguments["mode"] == MODES["lstm"] else 1) * ran.arguments["num_layers"]
        zeros = states * batch * ran.arguments["hidden_size"] * 4 * (2 if ran.arguments["bidirectional"] else 1)
        found = taken(ran)
        assert lasting(found, RESULT) + zeros == pytest.approx(row["kept"], abs=4096), row
        assert lasting(found, "moment") == pytest.approx(row["forward"], rel=0.06), row
        exact.append(abs(lasting(found, "moment") - row["forward"]) < 4096)
    assert sum(exact) > 0.9 * len(exact)  # most of them to the kilobyte


def test_the_first_step_first() -> None:
    plain = operation("gru", (256, 256, 64, 512), 3, bidirectional=True)
    first = operation("gru", (256, 256, 64, 512), 3, bidirectional=True, batch_first=True)
    first = Operation(first.name, (Shape((256, 256, 64), "float32", 4),), first.outputs, first.arguments)
    copied = lasting(taken(first), "moment") - lasting(taken(plain), "moment")
    assert copied == 256 * 256 * 64 * 4
    assert lasting(taken(first), "moment") / 2**20 == pytest.approx(1695.8, abs=0.1)  # as it was seen


def test_the_backward_pass_holds_gradients_in_order() -> None:
    first = operation("gru", (256, 256, 64, 512), 3, bidirectional=True, batch_first=True)
    x, gradient = Shape((256, 256, 64), "float32", 4), Shape((256, 256, 1024), "float32", 4)
    weights = 3 * 512 * 2 * 4 * (64 + 2 * 1024 + 3 * 512)

    def beside(gradient: Shape) -> int:
        """Bytes beside all results, before those of the weights are there."""
        inputs = (x, gradient)
        found = taken(Operation("aten._cudnn_rnn_backward.default", inputs, (), first.arguments))
        return sum(need.bytes for need in found if need.ahead is not None) - weights

    assert beside(gradient) / 2**20 == pytest.approx(1911.9, abs=4)  # as it was seen
    in_order = replace(gradient, strides=(1024, 256 * 1024, 1))
    assert beside(gradient) - beside(in_order) == gradient.nbytes


def test_dropout_brings_a_generator_that_stays() -> None:
    found = taken(operation("lstm", (8, 16, 32, 32), 2, dropout=0.1))
    assert lasting(found, PROCESS) == 132 * 2048 * 24
    assert lasting(taken(operation("lstm", (8, 16, 32, 32), 1, dropout=0.1)), PROCESS) == 0
