"""What operations take besides their results, the tables that say how much, and how they are made."""

import importlib.util
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hotloop.apps.simulate.cards import card, cards
from hotloop.apps.simulate.convolution_workspaces import ConvolutionTiming
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.families.indexing import adds_gradients
from hotloop.apps.simulate.families.matmul import blas_workspace
from hotloop.apps.simulate.library_memory import Constants, constants_for, read_constants, tables
from hotloop.apps.simulate.workspaces import library, needs

from ..thorough import some

MIB = 2**20
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
H200, T4 = card("h200"), card("t4")
TABLE = Constants(
    architecture="any",
    torch="2.11",
    calibrated=True,
    source="made up",
    context={"base": 100},
    convolution={
        "forward/tf32/first": ("8 16 24 32 3 1 1 2 1 1 0.5 2 0 7", "8 16 24 32 1 1 1 2 1 0 0 3 0 0"),
        "forward/tf32/first/benchmark": ("8 16 24 32 3 1 1 2 1 3 0 0 0 0",),
        "forward/fp32/first": ("8 16 24 32 3 1 1 2 1 0 4 0 0 0",),
        "input/half/last": ("8 16 24 32 1 1 1 2 1 0 0 1 0 0",),
        "weight/half/last": ("8 16 24 32 1 1 1 2 1 0 2 0 0 0",),
        "input/tf32/first": ("8 16 24 32 3 1 1 2 1 9 0 0 0 0",),
    },
    factors={"lstm.steps": 5.0, "lstm.states": 9.0, "rnn.layer": 1000.0, "batch_norm.reserve": 0.125},
)


def tensor(*sizes: int, dtype: str = "float32", last: bool = False) -> Shape:
    return Shape(sizes, dtype, {"float32": 4, "bfloat16": 2, "int64": 8}[dtype], channels_last=last)


def bytes_of(operation: Operation, on: str = "h200") -> list[int]:
    return [need.bytes for need in needs(operation, card(on), TABLE)]


def test_new_architectures_give_cublas_32_mib_and_older_ones_8_mib_and_a_bit() -> None:
    assert {blas_workspace(card(key)) for key in ("h200", "b200", "rtx5090")} == {32 * MIB}
    assert {blas_workspace(card(key)) for key in ("t4", "v100-16", "a100-80", "rtx4090", "l4")} == {8_519_680}


def test_each_thread_has_a_workspace_for_ever() -> None:
    keys = {}
    for phase in ("forward", "backward", "optimizer"):
        (need,) = needs(Operation("aten.mm.default", (), (), phase=phase), H200, TABLE)
        assert (need.lasting, need.bytes) == ("process", 32 * MIB)
        keys[phase] = need.key
    assert keys["forward"] == keys["optimizer"] != keys["backward"]


def test_a_product_with_a_bias_has_another() -> None:
    x, bias = tensor(8, 16), tensor(24)
    first, second = needs(Operation("aten.addmm.default", (bias, x, tensor(16, 24)), (tensor(8, 24),)), H200, TABLE)
    assert (first.bytes, second.bytes, second.lasting) == (32 * MIB, MIB, "process")
    assert first.key != second.key
    matrix = Operation("aten.addmm.default", (tensor(8, 24), x, tensor(16, 24)), (tensor(8, 24),))
    assert bytes_of(matrix) == [32 * MIB]


X, W, Y = tensor(8, 16, 32, 32), tensor(24, 16, 3, 3), tensor(8, 24, 32, 32)


def test_a_convolution_takes_shares_of_its_operands() -> None:
    made = Operation("aten.convolution.default", (X, W), (Y,), {"groups": 1})
    assert bytes_of(made) == [X.nbytes + W.nbytes // 2 + 2 * Y.nbytes + 7]
    assert bytes_of(made, "t4") == [4 * W.nbytes]  # no TF32 there
    tuned = Operation("aten.convolution.default", (X, W), (Y,), {"groups": 1, "benchmark": True})
    assert bytes_of(tuned) == [3 * X.nbytes]
    exact = Operation("aten.convolution.default", (X, W), (Y,), {"groups": 1, "allow_tf32": False})
    assert bytes_of(exact) == [4 * W.nbytes]


def test_it_takes_what_the_nearest_of_its_kind_took() -> None:
    pointwise = tensor(24, 16, 1, 1)
    assert bytes_of(Operation("aten.convolution.default", (X, pointwise), (Y,), {"groups": 1})) == [3 * Y.nbytes]
    wide = tensor(24, 16, 5, 5)
    made = Operation("aten.convolution.default", (X, wide), (Y,), {"groups": 1})
    assert bytes_of(made) == [X.nbytes + wide.nbytes // 2 + 2 * Y.nbytes + 7]


def test_a_transposed_one_is_the_gradient_of_another() -> None:
    weight = tensor(16, 24, 3, 3)
    made = Operation("aten.convolution.default", (X, weight), (Y,), {"groups": 1, "transposed": True})
    assert bytes_of(made) == [9 * Y.nbytes]  # which is what the other one reads


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


def test_an_lstm_that_drops_keeps_what_it_dropped() -> None:
    """As it was recorded on an H200: 32 sentences of 40 words, 256 to 512 to 512, a fifth dropped."""
    x = tensor(32, 40, 256)
    shape = {"mode": 2, "hidden_size": 512, "num_layers": 2, "batch_first": True, "dropout": 0.2, "train": True}
    made = Operation("aten._cudnn_rnn.default", (x,), (x,), shape)
    generator, copy, workspace, reserve = needs(made, H200, constants_for(H200, "2.11"))
    assert (copy.bytes, copy.ahead) == (x.nbytes, 0)
    assert (generator.bytes, generator.lasting) == (6_488_064, "process")
    assert workspace.bytes == pytest.approx(49_807_872, abs=1024)
    assert reserve.bytes == 28_918_016


def test_flash_attention_adds_up_in_fp32() -> None:
    q = tensor(2, 12, 1000, 80, dtype="bfloat16")
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    rows = 2 * 12 * 1024
    assert bytes_of(Operation(name, (q, q, q, q), (q, q, q)), "a100-80") == [4 * rows, 4 * rows * 96]
    grouped = tensor(2, 4, 1000, 80, dtype="bfloat16")
    assert bytes_of(Operation(name, (q, q, grouped, grouped), (q,)), "a100-80")[2:] == [q.nbytes, q.nbytes]


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_cudnn_attends_on_hopper(kernel: str) -> None:
    """As it was recorded on an H200, where PyTorch 2.11 chooses it by itself: 16 batches, 8 heads, 256 tokens."""
    q = tensor(16, 8, 256, 64, dtype="bfloat16")
    name = f"aten._scaled_dot_product_{kernel}_attention_backward.default"
    assert bytes_of(Operation(name, (q, q, q, q), (q,))) == [8_519_936]


def test_memory_efficient_attention_works_in_blocks() -> None:
    """As it was recorded on an H200: in fp32, products first."""
    name = "aten._scaled_dot_product_efficient_attention_backward.default"
    q = tensor(8, 8, 256, 64)
    sums, products, blocks = needs(Operation(name, (q, q, q, q), (q,)), H200, TABLE)
    assert (sums.bytes, products.bytes, blocks.bytes) == (65_536, 4_194_304, 4_198_400)
    assert sums.key == "together" != blocks.key
    half = tensor(8, 8, 256, 64, dtype="bfloat16")
    assert bytes_of(Operation(name, (half,) * 4, (half,)), "a100-80") == [65_536, 4_198_400]


def test_smaller_helpers() -> None:
    few, many = tensor(100, dtype="int64"), tensor(8192, dtype="int64")
    weight = tensor(50_000, 64)
    assert not bytes_of(Operation("aten.embedding_dense_backward.default", (tensor(100, 64), few), (weight,)))
    embedding = bytes_of(Operation("aten.embedding_dense_backward.default", (tensor(8192, 64), many), (weight,)))
    assert embedding == [8 * 8192] * 5 + [8 * 9011, 256 * 9011]
    norm = Operation("aten._foreach_norm.Scalar", (tensor(65_537), tensor(10)), (tensor(), tensor()))
    assert bytes_of(norm) == [4 * 2 * 2]
    assert not bytes_of(Operation("aten.relu.default", (X,), (X,)))
    put = Operation("aten.index_put_.default", (weight, many, tensor(8192, 64)), (weight,), {"accumulate": True})
    assert bytes_of(put) == [8 * 8192] * 3
    cubes, pairs = tensor(512, 27, 27), tensor(300, dtype="int64")
    inner = (cubes, pairs, pairs, tensor(512, 300))  # cubes[:, i, j]: the values do not begin as the indices do
    put = Operation("aten.index_put.default", inner, (cubes,), {"accumulate": True})
    assert bytes_of(put) == [8 * 300] * 3 + [4 * 512 * 300]


def test_gradients_are_added_up_in_place() -> None:
    """Whatever the order in which they lie, and also where they are put into zeros by their indices."""
    x = tensor(64, 32)
    turned = replace(x, strides=(1, 64))
    add = Operation("aten.add.Tensor", (x, turned), (x,), phase="backward")
    assert adds_gradients(add)
    assert not adds_gradients(replace(add, phase="forward"))
    assert not adds_gradients(replace(add, inputs=(x, tensor(32))))
    put = Operation("aten.index_put.default", (x, x, x), (x,), {"accumulate": True}, phase="backward")
    assert adds_gradients(put)
    assert not adds_gradients(replace(put, arguments={"accumulate": False}))
    assert not adds_gradients(None)


def test_losses_and_softmax_have_temporaries() -> None:
    """As they were seen on an H200."""
    x = tensor(32, 1, 256, 256)
    loss = Operation("aten.binary_cross_entropy_with_logits.default", (x, x), (tensor(),), {})
    assert bytes_of(loss) == [x.nbytes] * 2
    scores = tensor(64, 4, 256, 256)
    assert bytes_of(Operation("aten._softmax_backward_data.default", (scores, scores), (scores,))) == [scores.nbytes]
    assert bytes_of(Operation("aten._safe_softmax.default", (scores,), (scores,))) == [scores.numel]


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


def test_tables_are_sound() -> None:
    for table in tables():
        assert table.source
        assert 0 < table.margin < 0.2
        for key, rows in table.convolution.items():
            part, precision, layout, *benchmark = key.split("/")
            assert part in ("forward", "input", "weight")
            assert (precision in ("tf32", "half", "fp16", "fp32"), layout in ("first", "last")) == (True, True)
            assert benchmark in ([], ["benchmark"])
            numbers = np.array(" ".join(rows).split(), dtype=float).reshape(len(rows), -1)
            assert numbers.size
            assert numbers[:, 9:].min() >= 0  # shares and bytes
            kinds = set()
            for row in rows[::50] + rows[:24]:
                assert str(ConvolutionTiming.read(row)) == row
                kinds.add(ConvolutionTiming.read(row).case.kind)
            assert {"spatial", "pointwise", "depthwise"} <= kinds


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(TABLE.to_json()))
    assert read_constants(tmp_path / "table.json") == TABLE


def calibration() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibrate_memory", BENCHMARKS / "calibrate_memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_calibration_measured_becomes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    made = calibration()
    notes = made.Notes(
        tmp_path / "raw.json.gz", 60.0, {"hardware": "NVIDIA H200, a host", "versions": {"torch": "2.12.1"}}
    )
    sizes = {"x": 1000, "weight": 10, "y": 5000}
    what = "convolution forward tf32 first (8, 16, 32, 56, 3, 1, 1, 2)"
    for taken in (6010, 0):  # what is there is not measured again
        notes.attempt(what, lambda: {"key": "forward/tf32/first/spatial", **sizes, "taken": taken})  # noqa: B023
    notes.attempt("fails", lambda: {"never": 1 / 0})
    norm = {"last": True, "dtype": "torch.float32", "reserve": 10, "beside": 20, "numel": 80}
    notes.attempt("batch norm 1", lambda: norm)
    notes.attempt("batch norm 2", lambda: {**norm, "dtype": "torch.float16", "reserve": 40})
    notes.about["context"] = {"base": 7}
    notes.write()
    table = read_constants(made.write_table(made.read(tmp_path / "raw.json.gz"), tmp_path))
    assert notes.failures == ["fails: ZeroDivisionError: division by zero"]
    assert (table.architecture, table.torch, table.calibrated, table.context["base"]) == ("hopper", "2.12", True, 7)
    assert table.convolution == {"forward/tf32/first": ("8 16 32 56 3 1 1 2 1 1 1 1 0 0",)}
    assert (table.factors["batch_norm.reserve"], table.factors["batch_norm.workspace"]) == (0.125, 0.25)
    assert table.factors["batch_norm.reserve.half"] == 0.5


def kind_of(key: str) -> tuple[str, ...]:
    """WorkPart, precision and layout of a convolution that was measured."""
    return tuple(key.split("/")[:3])


def test_the_table_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    quicker = lambda words: json.loads(f"[{words[1:-1]}]")  # noqa: E731  # for tuples of numbers, of which there are many
    monkeypatch.setattr("ast.literal_eval", quicker)
    made = calibration()
    raw = made.read(BENCHMARKS / "results" / "memory_calibration_h200.json.gz")
    table, kinds = constants_for(H200, "2.11"), sorted({kind_of(row["key"]) for row in raw["rows"] if "key" in row})
    kept = set(some(kinds, kinds[::16]))
    raw["rows"] = [row for row in raw["rows"] if "key" not in row or kind_of(row["key"]) in kept]
    assert made.table_of(raw) == replace(
        table, convolution={key: plans for key, plans in table.convolution.items() if kind_of(key) in kept}
    )


def test_every_kind_of_convolution_is_measured_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    made = calibration()
    kinds = Counter(case.kind for case in made.CASES)
    assert set(kinds) == {"spatial", "pointwise", "depthwise", "grouped", "volume"}
