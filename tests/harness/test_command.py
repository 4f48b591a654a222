"""`python -m harness` as a person runs it."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from harness.__main__ import bench
from harness.records import Benchmark
from hotloop.errors import BadArgument, DeviceUnavailable, HotloopError, OutputError
from hotloop.report.runs import read_run

from ..report.reading import Reader

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
    page = Reader((folder / "report.html").read_text())
    for words in ("A quick run.", "no figures to quote", "mlp on cpu: rows", "The same training: mlp on cpu"):
        assert words in page.text
    assert all(address.startswith("data:") for address in page.addresses)
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
        (("mlp", "--contestants", "expert"), BadArgument, "--expert"),
        (("mlp", "--expert", "nowhere"), BadArgument, "nowhere"),
        (("mlp", "--repeats", "0"), BadArgument, "repeats=0"),
        (("mlp", "--out", "file"), OutputError, "is a file"),
        (("mlp", "--plans"), BadArgument, "--plans without --end-to-end"),
        (("mlp", "--end-to-end", "10", "--no-compiled"), BadArgument, "--no-compiled without --plans"),
        (("mlp", "--end-to-end", "soon"), BadArgument, "10,45"),
        (("mlp", "--end-to-end", "0"), BadArgument, "a run of 0 seconds"),
        (("mlp", "--end-to-end", "10", "--expert", "."), BadArgument, "--expert with --end-to-end"),
    ],
)
def test_a_mistake_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], error: type[HotloopError], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    done = run("--quick", "--devices", "cpu", *args)
    assert isinstance(done.exception, error | DeviceUnavailable)
    assert words in str(done.exception)
    assert "fix:" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
