"""The benchmark of convergence trains with both plans, judges by the spread of the seeds, and writes what it found."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from .conftest import Import

PLAIN = (1.0, 1.1, 1.2)


@pytest.fixture
def convergence(benchmark: Import) -> Any:
    return benchmark("convergence")


@pytest.mark.parametrize(
    ("figure", "plain", "auto", "equal"),
    [
        ("loss", PLAIN, PLAIN, True),
        ("loss", PLAIN, [1.15, 1.25, 1.35], True),
        ("loss", PLAIN, [1.25, 1.35, 1.45], False),
        ("loss", PLAIN, [0.75, 0.85, 0.95], False),
        ("loss", PLAIN, [1.0, 1.1, 9.0], False),  # a seed that diverges does not widen what is allowed
        ("loss", PLAIN, [1.0, 1.1, math.nan], False),
        ("accuracy", [1.0, 1.0, 1.0], [0.9995, 1.0, 0.9995], True),  # an item or two, where all seeds are right
        ("accuracy", [1.0, 1.0, 1.0], [0.99, 0.99, 0.99], False),
    ],
)
def test_means_are_equal_that_differ_by_less_than_the_seeds(
    convergence: Any, figure: str, plain: Sequence[float], auto: Sequence[float], equal: bool
) -> None:
    """The other figure is the same in all runs, and so is equal."""
    rest = {"task": "a", "loss": 1.0, "accuracy": 1.0, "seconds": 1.0, "steps": 10, "levers": (), "changed_at": ()}
    runs = [
        convergence.Run(**{**rest, "plan": plan, "seed": seed, figure: value})
        for plan, values in (("plain", plain), ("auto", auto))
        for seed, value in enumerate(values)
    ]
    verdicts = {each.figure: each.is_within for each in convergence.compare(runs)}
    assert verdicts.pop(figure) == equal
    assert list(verdicts.values()) == [True]


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
    monkeypatch.setattr(
        "sys.argv", ["convergence.py", "sprite-classifier", "--quick", "--seeds", "2", "--out", str(out)]
    )
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
