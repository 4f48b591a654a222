"""The benchmark of convergence trains with both plans, judges by the spread of the seeds, and writes what it found."""

import dataclasses
import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "convergence.py"
PLAIN = (1.0, 1.1, 1.2)


@pytest.fixture
def convergence(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    return importlib.import_module("convergence")


def are_equal(convergence: Any, figure: str, plain: Sequence[float], auto: Sequence[float]) -> bool:
    """Whether a figure counts as equal in two plans; the other figure is the same in all runs, and so is equal."""
    rest = {"seconds": 1.0, "steps": 10, "levers": (), "changed_at": ()}
    runs = [
        convergence.Run(
            **{"task": "a", "plan": plan, "seed": seed, "loss": 1.0, "accuracy": 1.0, figure: value, **rest}
        )
        for plan, values in (("plain", plain), ("auto", auto))
        for seed, value in enumerate(values)
    ]
    verdicts = {each.figure: each.is_within for each in convergence.compare(runs)}
    equal: bool = verdicts.pop(figure)
    assert list(verdicts.values()) == [True]
    return equal


def test_means_that_differ_by_less_than_the_seeds_are_equal(convergence: Any) -> None:
    assert are_equal(convergence, "loss", PLAIN, PLAIN)
    assert are_equal(convergence, "loss", PLAIN, [1.15, 1.25, 1.35])


@pytest.mark.parametrize("shift", [0.25, -0.25])
def test_means_that_differ_by_more_than_the_seeds_are_not(convergence: Any, shift: float) -> None:
    assert not are_equal(convergence, "loss", PLAIN, [value + shift for value in PLAIN])


@pytest.mark.parametrize("diverged", [9.0, math.inf, math.nan])
def test_a_seed_that_diverges_does_not_widen_what_is_allowed(convergence: Any, diverged: float) -> None:
    assert not are_equal(convergence, "loss", PLAIN, [1.0, 1.1, diverged])


def test_an_item_or_two_is_no_difference_where_all_seeds_are_right(convergence: Any) -> None:
    assert are_equal(convergence, "accuracy", [1.0, 1.0, 1.0], [0.9995, 1.0, 0.9995])
    assert not are_equal(convergence, "accuracy", [1.0, 1.0, 1.0], [0.99, 0.99, 0.99])


def test_it_trains_with_both_plans_and_writes_what_it_found(
    tmp_path: Path, convergence: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, made = tmp_path / "r.json", convergence.sprite_classifier

    def smaller(quick: bool) -> Any:
        task = made(quick)
        held_out = TensorDataset(*(each[:128] for each in task.held_out.tensors))
        return dataclasses.replace(task, held_out=held_out, epochs=2)

    monkeypatch.setitem(convergence.TASKS, "sprite-classifier", smaller)
    monkeypatch.setenv("HOTLOOP_CACHE", "restored afterwards")
    monkeypatch.setattr("sys.argv", [str(BENCHMARK), "sprite-classifier", "--quick", "--seeds", "2", "--out", str(out)])
    code, printed = convergence.main(), capsys.readouterr().out
    written = json.loads(out.read_text())
    assert {"command", "date", "commit", "hardware", "versions"} <= set(written)
    runs = written["runs"]
    assert [(run["plan"], run["seed"]) for run in runs] == [("plain", 0), ("auto", 0), ("auto", 1), ("plain", 1)]
    for run in runs:
        assert math.isfinite(run["loss"])
        assert run["accuracy"] > 2 / 16, "twice as much as by chance"
        assert run["plan"] == "auto" or not run["levers"]
    comparisons = written["comparisons"]
    assert [each["figure"] for each in comparisons] == ["loss", "accuracy"]
    assert all(each["within"] is (abs(each["difference"]) <= each["allowed"]) for each in comparisons)
    assert code == (0 if all(each["within"] for each in comparisons) else 1)
    assert "wall clock" in printed


@pytest.mark.parametrize("name", ["sprite-classifier", "sprite-generator", "resnet18", "gpt"])
def test_a_task_trains_and_is_validated(
    tmp_path: Path, convergence: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    task = convergence.TASKS[name](True)
    seen = {tuple(row.flatten().tolist()) for row in task.data.tensors[0]}
    assert not any(tuple(row.flatten().tolist()) in seen for row in task.held_out.tensors[0]), "held out"
    data, held_out = (TensorDataset(*(each[:64] for each in part.tensors)) for part in (task.data, task.held_out))
    short = dataclasses.replace(task, data=data, held_out=held_out, epochs=1)
    run = convergence.train(name, short, "plain", 0, torch.device("cpu"))
    assert run.steps == 64 // task.batch
    assert math.isfinite(run.loss)
    assert 0 <= run.accuracy <= 1


def test_one_seed_has_no_spread(
    convergence: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(BENCHMARK), "--quick", "--seeds", "1"])
    with pytest.raises(SystemExit) as ended:
        convergence.main()
    assert ended.value.code == 2
    assert "2 or more" in capsys.readouterr().err
