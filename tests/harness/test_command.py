"""`python -m harness` as a person runs it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from harness.__main__ import bench
from harness.records import Benchmark
from harness.scaling import ScalingSetup
from harness.scaling_records import ScalingBenchmark
from hotloop.errors import BadArgument, DeviceUnavailable, HotloopError, OutputError
from hotloop.report.runs import read_run

from .test_scaling_charts import FOUND

pytestmark = pytest.mark.usefixtures("light_heap")
QUICK = ("mlp", "--quick", "--devices", "cpu", "--contestants", "tutorial,hotloop", "--plan-for", "1", "--repeats", "1")


def run(*args: str) -> Result:
    app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command("bench")(bench)
    return CliRunner().invoke(app, ["bench", *args], env={"COLUMNS": "100", "TERM": "dumb"})


def test_the_figures_and_the_pictures_are_written(tmp_path: Path) -> None:
    done = run(*QUICK, "--out", str(tmp_path / "new"))
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "new").iterdir()
    (figures,) = folder.glob("20*.json")
    names = {path.name for path in folder.iterdir()}
    pictures = {"bars.png", "roofline-cpu.png", "curves-mlp.png"}
    assert names == {figures.name, "report.html", "report.json", *pictures}
    assert read_run(folder).run.kind == "bench"
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    benchmark = Benchmark.from_json(json.loads(figures.read_text()))
    assert [score.contestant for score in benchmark.scores] == ["tutorial", "hotloop"]
    assert "mlp" in done.stdout
    assert "bars.png" in done.stdout
    assert "rows per second" in done.stderr
    page = (folder / "report.html").read_text()
    assert '<p class="warn" role="status"><strong>A quick run.</strong>' in page
    assert "no figures to quote" in page
    assert "no figures to quote" in done.stdout
    assert read_run(folder).run.title == "mlp, quick"


def test_whole_runs_are_timed_end_to_end(tmp_path: Path) -> None:
    args = ("mlp", "--quick", "--devices", "cpu", "--end-to-end", "5,20", "--plans", "--out", str(tmp_path))
    done = run(*args)
    assert done.exit_code == 0, done.output
    for words in ("careful", "default,", "by hand,", "0.05 s", "0.2 s", "an epoch at the end", "the wall clock"):
        assert words in done.stdout
    assert "no figures to quote" in done.stdout
    assert "at most about" in done.stderr
    assert "times as fast" in done.stderr
    (folder,) = tmp_path.iterdir()
    (figures,) = folder.glob("20*.json")
    benchmark = Benchmark.from_json(json.loads(figures.read_text()))
    (row,) = benchmark.end_to_end
    assert [run.length for run in row.runs if run.given == "default"] == [0.05, 0.2]
    assert row.best_by_hand(0.2) is not None
    assert read_run(folder).run.title == "mlp, quick"
    page = (folder / "report.html").read_text()
    assert "What a person gets who says nothing" in page
    assert "default, 0.2 s" in page


def test_whole_runs_as_json_with_curves_and_what_did_not_run(tmp_path: Path) -> None:
    args = ("mlp", "--end-to-end", "5", "--contestants", "careful", "--curves", "--json", "--out", str(tmp_path))
    done = run("--quick", "--devices", "cpu", *args)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert list(data["end_to_end"][0]["peers"]) == ["careful"]
    assert [drawn["workload"] for drawn in data["curves"]] == ["mlp"]
    assert data["scores"] == []
    assert all(Path(file).exists() for file in data["files"])
    assert "times as fast" in done.stderr


def test_where_nobody_could_run_the_exit_code_and_the_only_object_on_stdout_say_so(tmp_path: Path) -> None:
    (tmp_path / "experts").mkdir()
    args = ("--contestants", "expert", "--expert", str(tmp_path / "experts"), "--out", str(tmp_path / "out"))
    done = run("mlp", "--quick", "--devices", "cpu", "--json", "--no-curves", *args)
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert "no loop of an expert" in data["failures"][0]
    assert data["scores"] == data["curves"] == []
    assert all(Path(file).exists() for file in data["files"])
    (folder,) = (tmp_path / "out").iterdir()
    (figures,) = folder.glob("20*.json")
    assert json.loads(figures.read_text())["failures"]
    assert "no loop of an expert" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (("vgg",), BadArgument, "resnet18"),
        (("mlp", "--contestants", "fastai"), BadArgument, "lightning"),
        (("mlp", "--contestants", ","), BadArgument, "--contestants is empty"),
        (("mlp", "--contestants", "expert"), BadArgument, "--expert"),
        (("mlp", "--expert", "nowhere"), BadArgument, "nowhere"),
        (("mlp", "--devices", "warp"), BadArgument, "warp"),
        (("mlp", "--repeats", "0"), BadArgument, "repeats=0"),
        (("mlp", "--plan-for", "-1"), BadArgument, "-1"),
        (("mlp", "--out", "file"), OutputError, "is a file"),
        (("mlp", "--plans"), BadArgument, "--plans without --end-to-end"),
        (("mlp", "--warm"), BadArgument, "--warm without --end-to-end"),
        (("mlp", "--tutorial", "5"), BadArgument, "--tutorial without --end-to-end"),
        (("mlp", "--end-to-end", "10", "--no-compiled"), BadArgument, "--no-compiled without --plans"),
        (("mlp", "--end-to-end", "10", "--tutorial", "0"), BadArgument, "a run of 0 seconds"),
        (("mlp", "--end-to-end", "soon"), BadArgument, "10,45"),
        (("mlp", "--end-to-end", "0"), BadArgument, "a run of 0 seconds"),
        (("mlp", "--end-to-end", "10", "--contestants", "fastai"), BadArgument, "careful"),
        (("mlp", "--end-to-end", "10", "--expert", "."), BadArgument, "--expert with --end-to-end"),
        (("mlp", "--end-to-end", "10", "--out", "file"), OutputError, "is a file"),
    ],
)
def test_a_mistake_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], error: type[HotloopError], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    done = run("--quick", *(() if "--devices" in args else ("--devices", "cpu")), *args)
    assert isinstance(done.exception, error | DeviceUnavailable)
    assert words in str(done.exception)
    assert "fix:" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_help_teaches_by_examples() -> None:
    done = run("--help")
    assert done.exit_code == 0
    for words in ("Examples", "python -m harness mlp --quick", "--plan-for", "--end-to-end", "expert", "median"):
        assert words in done.stdout


def test_ranks_are_measured_written_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ScalingSetup] = []

    def measure(setup: ScalingSetup, *, command: str, tell: Callable[[str], None]) -> ScalingBenchmark:
        asked.append(setup)
        tell("turn 1: a step of 1 rank")
        return replace(FOUND, command=command, workload=setup.workload)

    monkeypatch.setattr("harness.scaling.run_scaling", measure)  # tests/harness/test_scaling.py runs it
    args = ("--scaling", "mlp", "--ranks", "1,2", "--quick", "--devices", "cpu", "--repeats", "1")
    done = run(*args, "--out", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    assert asked == [ScalingSetup("mlp", torch.device("cpu"), ranks=(1, 2), repeats=1, quick=True)]
    data = json.loads(done.stdout)
    found = ScalingBenchmark.from_json({name: value for name, value in data.items() if name != "files"})
    assert {each.ranks for each in found.measured} == {1, 2}
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {"scaling-mlp.json", "scaling-mlp.png"}
    assert data["files"] == [str(folder / "scaling-mlp.json"), str(folder / "scaling-mlp.png")]
    assert (folder / "scaling-mlp.png").read_bytes().startswith(b"\x89PNG")
    assert "turn 1: a step of 1 rank" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--scaling", "mlp", "cnn"), "one workload on one device"),
        (("--scaling", "--ranks", "two"), "--ranks two"),
        (("--scaling", "--ranks", "0"), "at least 1"),
        (("--scaling", "--end-to-end", "10"), "options of another benchmark"),
        (("--ranks", "1,2"), "--ranks without --scaling"),
        (("--scaling", "nothing"), "there is no workload"),
    ],
)
def test_ranks_that_cannot_be_meant(args: tuple[str, ...], words: str) -> None:
    done = run(*args, "--devices", "cpu")
    assert isinstance(done.exception, BadArgument)
    assert words in str(done.exception)
