"""Benchmarks: ratios that are right, and pictures for every shape that a benchmark can have."""

import math
from dataclasses import replace
from io import BytesIO, StringIO

import pytest
from PIL import Image
from rich.console import Console
from rich.table import Table

from harness.charts import bars, curve_figures, scores_table
from harness.records import Benchmark, Curves, Score
from harness.roofline import roofline
from hotloop.report.words import times

RATES = {"tutorial": 1000.0, "accelerate": 800.0, "fabric": 2000.0, "lightning": 900.0, "hotloop": 8000.0}


def made_score(workload: str, contestant: str, rate: float, device: str = "cuda") -> Score:
    return Score(
        workload=workload,
        contestant=contestant,
        device=device,
        unit="images",
        rate=rate,
        low=rate * 0.95,
        high=rate * 1.05,
        repeats=5,
        steps=100,
        start=1.5,
        whole=rate * 0.7,
        peak_memory=None,
        flops=3e7,
        traffic=2e6,
        note="",
    )


def made_benchmark(scores: tuple[Score, ...] | None = None) -> Benchmark:
    if scores is None:
        cuda = tuple(made_score("small CNN", name, rate) for name, rate in {**RATES, "expert": 10_000.0}.items())
        scores = (*cuda, *(made_score("MLP", name, RATES[name], "cpu") for name in ("hotloop", "tutorial")))
    return Benchmark(
        hardware="Test GPU",
        command="python -m harness",
        date="2026-01-02T03:04:05+00:00",
        commit=None,
        versions={},
        scores=scores,
        curves=(),
        ceilings={"cuda": {"fp32": 5e13, "tf32": 4e14, "bf16": 8e14, "bytes": 4e12}},
        failures=("MLP, lightning: it is not installed",),
    )


def made_curves(length: int = 100) -> Curves:
    losses = tuple(2.0 / (step + 1) for step in range(length))
    return Curves(
        workload="MLP",
        device="cpu",
        steps=tuple(range(length)),
        tutorial=losses,
        hotloop=tuple(loss * 1.01 for loss in losses),
        again=tuple(loss * 0.98 for loss in losses),
    )


def shown(table: Table, width: int = 80) -> str:
    file = StringIO()
    Console(width=width, file=file, force_terminal=False, highlight=False).print(table)
    return file.getvalue()


def size_of(png: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(png)) as image:
        image.load()
        return image.size


def test_ratios_are_to_the_tutorial_the_best_peer_and_the_expert() -> None:
    lines = shown(scores_table(made_benchmark())).splitlines()
    ours = next(line for line in lines if line.startswith("hotloop"))
    assert ours.split() == ["hotloop", "8,000", "5%", times(8.0), times(4.0), times(0.8), "1.50", "s", "5,600"]


def test_every_group_and_contestant_is_there_and_what_failed_too() -> None:
    scores = tuple(replace(score, rate=score.rate * 1e3, start=72.0) for score in made_benchmark().scores)
    text = shown(scores_table(made_benchmark(scores)))
    for expected in ("small CNN · cuda · images", "MLP · cpu · images", *RATES, "expert", "it is not installed"):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


NOT_COUNTED = tuple(replace(score, flops=None, traffic=None) for score in made_benchmark().scores)
NO_RATE = (made_score("MLP", "tutorial", 0.0), made_score("MLP", "hotloop", 0.0))
MANY = tuple(made_score(f"workload {n} of many $x_1$", "hotloop", 5.0) for n in range(5))
ODD = {
    "empty": made_benchmark(()),
    "one score, no ceilings": made_benchmark((made_score("MLP", "hotloop", 5.0, "cpu"),)),
    "rates of 0, or nothing counted": made_benchmark((*NO_RATE, *NOT_COUNTED)),
    "equal ceilings, none of the memory": replace(made_benchmark(), ceilings={"cuda": {"bf16": 8e14, "fp16": 8e14}}),
    "many workloads, only the memory's ceiling": replace(made_benchmark(MANY), ceilings={"cuda": {"bytes": 4e12}}),
}


@pytest.mark.parametrize("benchmark", ODD.values(), ids=ODD)
def test_odd_benchmarks_still_give_a_table_and_pictures(benchmark: Benchmark) -> None:
    assert max(map(len, shown(scores_table(benchmark)).splitlines())) <= 80
    if benchmark.scores != made_benchmark().scores:
        assert size_of(bars(benchmark))[0] == 1800
    for device in ("cuda", "cpu", "absent") if len(benchmark.scores) < 2 else ("cuda",):
        assert size_of(roofline(benchmark, device))[0] == 1800


def test_the_figures_of_the_curves_are_the_differences() -> None:
    figures = curve_figures(made_curves())
    assert figures == pytest.approx(
        {
            "largest difference": 0.02,
            "mean relative difference": 0.01,
            "largest noise": 0.04,
            "mean relative noise": 0.02,
        }
    )


def test_what_is_not_known_is_no_number() -> None:
    assert all(math.isnan(value) for value in curve_figures(made_curves(0)).values())
    figures = curve_figures(replace(made_curves(), again=()))
    assert math.isnan(figures["largest noise"])
    assert figures["largest difference"] == pytest.approx(0.02)
    diverged = replace(made_curves(3), hotloop=(1.0, math.inf, math.nan))
    assert math.isnan(curve_figures(diverged)["largest difference"])
