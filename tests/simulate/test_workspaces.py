"""What operations take besides their results, the tables that say how much, and the fit that makes them."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.simulate.cards import card, cards
from hotloop.simulate.constants import Constants, Sample, constants_for, fit, read_constants, shares_of, tables
from hotloop.simulate.events import Operation, Shape
from hotloop.simulate.workspaces import blas_workspace, library, needs

MIB = 2**20
SHAPES = [(8, 16, 32, 56), (32, 64, 64, 28), (4, 256, 256, 14), (64, 32, 128, 16), (16, 512, 512, 7), (2, 3, 64, 224)]
H200, T4 = card("h200"), card("t4")
TABLE = Constants(
    architecture="any",
    torch="2.11",
    calibrated=True,
    source="made up",
    context={"base": 100},
    convolution={
        "forward/tf32/first/spatial": (1.0, 0.5, 2.0, 7.0),
        "forward/tf32/first/spatial/benchmark": (3.0, 0.0, 0.0, 0.0),
        "forward/fp32/first/spatial": (0.0, 4.0, 0.0, 0.0),
        "input/half/last/pointwise": (0.0, 0.0, 1.0, 0.0),
        "weight/half/last/spatial": (0.0, 2.0, 0.0, 0.0),
        "input/tf32/first/spatial": (9.0, 0.0, 0.0, 0.0),
    },
    factors={"lstm.reserve": 6.0, "lstm.workspace": 2.0, "lstm.backward": 3.0, "batch_norm.reserve": 0.125},
)


def tensor(*sizes: int, dtype: str = "float32", last: bool = False) -> Shape:
    return Shape(sizes, dtype, {"float32": 4, "bfloat16": 2, "int64": 8}[dtype], channels_last=last)


def bytes_of(operation: Operation, on: str = "h200") -> list[int]:
    return [need.bytes for need in needs(operation, card(on), TABLE)]


@pytest.mark.parametrize(("key", "size"), [("h200", 32 * MIB), ("b200", 32 * MIB), ("rtx5090", 32 * MIB)])
def test_new_architectures_give_cublas_32_mib(key: str, size: int) -> None:
    assert blas_workspace(card(key)) == size


@pytest.mark.parametrize("key", ["t4", "v100-16", "a100-80", "rtx4090", "l4"])
def test_older_ones_8_mib_and_a_bit(key: str) -> None:
    assert blas_workspace(card(key)) == 8_519_680


def test_each_thread_has_a_workspace_for_ever() -> None:
    keys = {}
    for phase in ("forward", "backward", "optimizer"):
        (need,) = needs(Operation("aten.addmm.default", (), (), phase=phase), H200, TABLE)
        assert (need.lasting, need.bytes) == ("process", 32 * MIB)
        keys[phase] = need.key
    assert keys["forward"] == keys["optimizer"] != keys["backward"]


X, W, Y = tensor(8, 16, 32, 32), tensor(24, 16, 3, 3), tensor(8, 24, 32, 32)


def test_a_convolution_takes_shares_of_its_operands() -> None:
    made = Operation("aten.convolution.default", (X, W), (Y,), {"groups": 1})
    assert bytes_of(made) == [X.nbytes + W.nbytes // 2 + 2 * Y.nbytes + 7]
    assert bytes_of(made, "t4") == [4 * W.nbytes]  # no TF32 there
    tuned = Operation("aten.convolution.default", (X, W), (Y,), {"groups": 1, "benchmark": True})
    assert bytes_of(tuned) == [3 * X.nbytes]
    exact = Operation("aten.convolution.default", (X, W), (Y,), {"groups": 1, "allow_tf32": False})
    assert bytes_of(exact) == [4 * W.nbytes]


def test_what_a_table_does_not_have_is_taken_as_the_common_kind() -> None:
    pointwise = tensor(24, 16, 1, 1)
    made = Operation("aten.convolution.default", (X, pointwise), (Y,), {"groups": 1})
    assert bytes_of(made) == [X.nbytes + pointwise.nbytes // 2 + 2 * Y.nbytes + 7]


def test_a_transposed_one_is_the_gradient_of_another() -> None:
    made = Operation("aten.convolution.default", (X, W), (Y,), {"groups": 1, "transposed": True})
    assert bytes_of(made) == [9 * X.nbytes]


def test_its_gradients_come_one_after_the_other() -> None:
    x, w = tensor(8, 16, 32, 32, dtype="bfloat16", last=True), tensor(24, 16, 1, 1, dtype="bfloat16", last=True)
    y = tensor(8, 24, 32, 32, dtype="bfloat16", last=True)
    both = Operation("aten.convolution_backward.default", (y, x, w), (x, w), {"output_mask": [True, True, False]})
    assert bytes_of(both) == [y.nbytes, 2 * w.nbytes]
    assert all(need.key != "together" and need.least == 0 for need in needs(both, H200, TABLE))
    first_layer = Operation("aten.convolution_backward.default", (y, x, w), (w,), {"output_mask": [False, True, False]})
    assert bytes_of(first_layer) == [2 * w.nbytes]


def test_batch_norm_keeps_a_reserve_where_channels_are_last() -> None:
    last = tensor(8, 16, 4, 4, last=True)
    (need,) = needs(Operation("aten.cudnn_batch_norm.default", (last,), (last,), {"training": True}), H200, TABLE)
    assert (need.bytes, need.lasting) == (last.numel // 8, "result")
    assert not bytes_of(Operation("aten.cudnn_batch_norm.default", (X,), (X,), {"training": True}))
    assert not bytes_of(Operation("aten.cudnn_batch_norm.default", (last,), (last,), {"training": False}))


def test_an_lstm_keeps_its_gates() -> None:
    x = tensor(20, 8, 10)
    shape = {"mode": 2, "hidden_size": 32, "num_layers": 2, "bidirectional": True, "train": True}
    unit = 20 * 8 * 32 * 2 * 2 * 4
    reserve, workspace = needs(Operation("aten._cudnn_rnn.default", (x,), (x,), shape), H200, TABLE)
    assert (reserve.bytes, reserve.lasting) == (6 * unit, "result")
    assert (workspace.bytes, workspace.lasting) == (2 * unit, "moment")
    assert bytes_of(Operation("aten._cudnn_rnn_backward.default", (x,), (x,), shape)) == [3 * unit]


def test_flash_attention_adds_up_in_fp32() -> None:
    q = tensor(2, 12, 1000, 80, dtype="bfloat16")
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    rows = 2 * 12 * 1024
    assert bytes_of(Operation(name, (q, q, q, q), (q, q, q))) == [4 * rows, 4 * rows * 96]
    grouped = tensor(2, 4, 1000, 80, dtype="bfloat16")
    assert bytes_of(Operation(name, (q, q, grouped, grouped), (q,)))[2:] == [q.nbytes, q.nbytes]


def test_other_attentions() -> None:
    q = tensor(2, 12, 1000, 64, dtype="bfloat16")
    efficient = Operation("aten._scaled_dot_product_efficient_attention_backward.default", (q, q, q, q), (q,))
    assert bytes_of(efficient) == [4 * 24_000, 4 * q.numel]
    cudnn = Operation("aten._scaled_dot_product_cudnn_attention_backward.default", (q, q, q, q), (q,))
    assert bytes_of(cudnn) == [4 * q.numel]


def test_smaller_helpers() -> None:
    few, many = tensor(100, dtype="int64"), tensor(8192, dtype="int64")
    weight = tensor(50_000, 64)
    assert not bytes_of(Operation("aten.embedding_dense_backward.default", (tensor(100, 64), few), (weight,)))
    embedding = bytes_of(Operation("aten.embedding_dense_backward.default", (tensor(8192, 64), many), (weight,)))
    assert embedding[:2] == [8 * 8192] * 2
    assert 7000 * 256 < embedding[2] < 9200 * 300
    norm = Operation("aten._foreach_norm.Scalar", (tensor(65_537), tensor(10)), (tensor(), tensor()))
    assert bytes_of(norm) == [4 * 2 * 2]
    assert not bytes_of(Operation("aten.relu.default", (X,), (X,)))
    put = Operation("aten.index_put_.default", (weight, many, tensor(8192, 64)), (weight,), {"accumulate": True})
    assert bytes_of(put) == [8 * 8192 * 64] * 3


def test_libraries_are_loaded_when_they_are_used() -> None:
    named = {"aten.mm.default": "blas", "aten.convolution.default": "cudnn", "aten._cudnn_rnn.default": "cudnn"}
    named["aten._scaled_dot_product_flash_attention.default"] = "attention"
    for name, expected in named.items():
        assert library(Operation(name, (), ())) == expected
    assert library(Operation("aten.relu.default", (), ())) is None


def test_every_card_has_a_table() -> None:
    for each in cards():
        found = constants_for(each, "2.11.0+cu128")
        assert found.architecture in (each.architecture, "any")
        assert 3e8 < sum(found.context.values()) < 2e9
    assert 1.3e9 <= sum(constants_for(H200, "2.11").context.values()) <= 1.45e9  # as it was measured


def test_tables_are_sound() -> None:
    for table in tables():
        assert table.source
        assert 0 < table.margin < 0.2
        for key, shares in table.convolution.items():
            assert len(shares) == 4
            assert min(shares) >= 0
            assert key.split("/")[0] in ("forward", "input", "weight")


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(TABLE.to_json()))
    assert read_constants(tmp_path / "table.json") == TABLE


@given(
    st.lists(st.tuples(*[st.integers(1, 10**6)] * 3), min_size=6, max_size=20, unique=True),
    st.tuples(*[st.integers(0, 5)] * 3),
)
def test_a_fit_explains_what_can_be_explained(rows: list[tuple[int, ...]], truth: tuple[int, ...]) -> None:
    seen = [sum(a * b for a, b in zip(row, truth, strict=True)) for row in rows]
    found = fit(rows, seen, rounds=3000)
    assert min(found) >= 0
    for row, right in zip(rows, seen, strict=True):
        assert sum(a * b for a, b in zip(row, found, strict=True)) == pytest.approx(
            right, rel=0.05, abs=0.05 * sum(row)
        )


def test_a_fit_has_no_negative_share() -> None:
    assert fit([(1, 1), (2, 1), (3, 1)], [0, 0, 0]) == (0.0, 0.0)
    assert fit([(1.0, 0.0), (1.0, 1.0)], [2.0, 1.0])[1] == 0.0
    assert fit([], []) == ()


def test_shares_of_convolutions_come_back_from_measurements() -> None:
    shapes = [(n * c * h * h * 4, c * k * 36, n * k * h * h * 4) for n, c, k, h in SHAPES]
    copied = [Sample("forward/tf32/first/spatial", x, w, y, x + w + y) for x, w, y in shapes]
    split = [Sample("weight/half/last/spatial", x, w, y, 3 * w + 2 * MIB) for x, w, y in shapes]
    seldom = [Sample("input/half/last/grouped", 1, 1, 1, 1)]
    found = shares_of([*copied, *split, *seldom])
    assert set(found) == {"forward/tf32/first/spatial", "weight/half/last/spatial"}
    for sample in [*copied, *split]:
        operands = (sample.x, sample.weight, sample.y, 1)
        model = sum(a * b for a, b in zip(found[sample.key], operands, strict=True))
        assert model == pytest.approx(sample.taken, rel=0.1, abs=0.02 * sum(operands))


def calibration() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "calibrate_memory.py"
    spec = importlib.util.spec_from_file_location("calibrate_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_calibration_measured_becomes_a_table(tmp_path: Path) -> None:
    made = calibration()
    notes = made.Notes(tmp_path / "raw.json", 60.0)
    shapes = [(n * c * h * h * 4, c * k * 36, n * k * h * h * 4) for n, c, k, h in SHAPES]
    for x, w, y in shapes:
        notes.attempt("one", Sample("forward/tf32/first/spatial", x, w, y, 2 * y)._asdict)
    notes.attempt("fails", lambda: {"never": 1 / 0})
    notes.attempt("cell", lambda: {"cell": "gru", "reserve": 5.5, "workspace": 1.0, "backward": 2.0})
    notes.attempt("cell", lambda: {"cell": "gru", "reserve": 5.25, "workspace": 1.5, "backward": 2.0})
    notes.attempt("norm", lambda: {"last": True, "reserve": 10, "numel": 80})
    notes.attempt("attention", lambda: {"backend": "EFFICIENT_ATTENTION", "copies": 1.25})
    assert made.factors_of(notes.rows) == {
        "gru.reserve": 5.5,
        "gru.workspace": 1.5,
        "gru.backward": 2.0,
        "batch_norm.reserve": 0.125,
        "attention.efficient": 1.25,
    }
    assert notes.failures == ["fails: ZeroDivisionError: division by zero"]
    shares = shares_of(made.samples_of(notes.rows))["forward/tf32/first/spatial"]
    assert shares[2] == pytest.approx(2, abs=0.2)
    notes.write(done=True)
    assert len(json.loads((tmp_path / "raw.json").read_text())["rows"]) == len(notes.rows)


def test_every_kind_of_convolution_is_measured_often_enough() -> None:
    made = calibration()
    kinds = Counter(case.kind for case in made.CASES)
    assert set(kinds) == {"spatial", "pointwise", "grouped", "volume"}
    assert min(kinds.values()) >= 3
