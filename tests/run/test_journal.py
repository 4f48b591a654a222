"""A run is watched and logged, and what it was begun with is kept; none of that can harm it."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotloop import Loop, Plan, Report, pick
from hotloop.errors import BadArgument, HotloopError, PlanWarning
from hotloop.monitor.logs import JsonLines, MissingLogger
from hotloop.run import run_files as run_folder
from hotloop.run.run_files import write_run

from .conftest import Kept


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine is not a driver that hangs: the last reading is waited for."""
    monkeypatch.setattr("hotloop.monitor.watching.LAST_READING", 120.0)


def loop_of(task: Any) -> Loop:
    torch.manual_seed(0)
    model = nn.Linear(task.inputs.shape[1], 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")


def test_the_report_tells_what_the_run_asked_of_the_hardware(task) -> None:
    report = loop_of(task).fit(task.loader(16), epochs=2, progress=False)
    assert report.load.samples >= 2, "one at the beginning and one at the end, however short it was"
    assert 0 < report.load.seconds <= report.seconds
    assert report.load.gpus == (), "it ran on a CPU"
    assert report.watched == 2 * len(task.inputs)
    assert Report.from_json(report.to_json()) == report
    assert not any(thread.name == "hotloop watch" for thread in threading.enumerate())


@pytest.mark.parametrize("monitor", [True, False])
def test_losses_and_readings_are_in_one_file(task, tmp_path: Path, monitor: bool) -> None:
    loop = loop_of(task)
    log = tmp_path / "new" / "run.jsonl"
    options = {"validate": task.loader(16), "progress": False, "log": log, "monitor": monitor}
    report = loop.fit(task.loader(16), epochs=3, **options)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ends = [line for line in lines if "epoch/loss" in line]
    assert [(line["epoch"], line["epoch/loss"]) for line in ends] == [(e.number, e.loss) for e in report.epochs]
    assert [line["validation/loss"] for line in ends] == [e.metrics["loss"] for e in report.epochs]
    assert ends[-1]["step"] == loop.steps
    assert any("items per second" in line for line in lines)
    assert any("host/cpu" in line for line in lines) == (report.load is not None) == monitor


def test_several_logs_get_the_same_numbers(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = Kept()
    report = loop_of(task).fit(
        task.loader(16), epochs=3, progress=False, log=["tensorboard", tmp_path / "run.jsonl", own]
    )
    losses = [epoch.loss for epoch in report.epochs]
    assert own.of("epoch/loss") == losses
    lines = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    assert [line["epoch/loss"] for line in lines if "epoch/loss" in line] == losses
    assert {name for line in lines for name in line} >= {"loss", "items per second", "lr", "epoch", "host/cpu"}
    assert list(tmp_path.rglob("events.*"))
    assert not own.closed, "whoever made it closes it"


def test_the_learning_rate_is_that_of_the_moment(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.run.parts.journal.EVERY", 0.0)  # every step

    def run(epochs: int, log: Kept) -> None:
        model = nn.Linear(task.inputs.shape[1], 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.8)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loop = Loop(
            model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain", scheduler=scheduler, schedule="epoch"
        )
        loop.fit(task.loader(16), epochs=epochs, progress=False, log=log, monitor=False, save=tmp_path, resume=True)

    first, resumed = Kept(), Kept()
    run(2, first)
    assert list(dict.fromkeys(first.of("lr"))) == [0.8, 0.4]
    run(3, resumed)
    assert set(resumed.of("lr")) == {0.2}, "not that of an optimizer whose state was replaced"


def test_a_learning_rate_on_the_device_is_not_read(task) -> None:
    log = Kept()
    loop = loop_of(task)
    loop.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.1)
    loop.fit(task.loader(16), progress=False, log=log, monitor=False)
    assert log.of("lr") == pytest.approx([0.1]), "a tensor on the host can be read"

    class Still(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """It reads no rate itself."""

    other, model = Kept(), nn.Linear(task.inputs.shape[1], 3)
    loop = Loop(model, Still(model.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu", plan="plain")
    loop.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    loop.fit(task.loader(16), progress=False, log=other, monitor=False)
    assert other.of("loss")
    assert not other.of("lr")


class Broken:
    """A log on a disk that fills up."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        raise OSError("no space left")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("monitor", [True, False])
def test_a_log_that_breaks_leaves_the_others_whole(task, monitor: bool) -> None:
    first, broken, last = Kept(), Broken(), Kept()
    options = {"progress": False, "log": [first, broken, last], "monitor": monitor}
    with pytest.warns(PlanWarning, match="no space left") as told:
        report = loop_of(task).fit(task.loader(16), epochs=3, **options)
    assert len(told) == 1
    assert not broken.closed, "whoever made it closes it"
    assert first.of("epoch/loss") == last.of("epoch/loss") == [epoch.loss for epoch in report.epochs]
    assert bool(last.of("host/cpu")) == monitor
    notes = [] if report.load is None else [note for note in report.load.notes if "log" in note]
    assert notes == [], "the readings went on too"


@pytest.mark.parametrize("calls", [["close"], ["write", "close"]])
def test_a_log_that_cannot_be_closed_is_told_once_and_costs_no_report(
    task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    close = JsonLines.close

    def broken(log: JsonLines, *_: object, **more: object) -> None:
        close(log)
        raise RuntimeError("the server is gone")

    for call in calls:
        monkeypatch.setattr(JsonLines, call, broken)
    with pytest.warns(PlanWarning, match="the server is gone") as told:
        report = loop_of(task).fit(task.loader(16), progress=False, log=tmp_path / "run.jsonl", monitor=False)
    assert len(told) == len(report.epochs) == 1


def test_of_several_logs_all_are_opened_or_none(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[JsonLines] = []
    close = JsonLines.close
    monkeypatch.setattr(JsonLines, "close", lambda log: (closed.append(log), close(log)))
    monkeypatch.setitem(sys.modules, "wandb", None)
    loop = loop_of(task)
    with pytest.raises(MissingLogger, match="pip install wandb"):
        loop.fit(task.loader(16), progress=False, log=[tmp_path / "run.jsonl", "wandb"])
    assert loop.steps == 0
    assert len(closed) == 1


def test_a_log_that_cannot_be_opened_is_told_before_anything_is_trained(task, tmp_path: Path) -> None:
    loop = loop_of(task)
    (tmp_path / "file").write_text("")
    with pytest.raises(HotloopError):
        loop.fit(task.loader(16), progress=False, log=tmp_path / "file" / "run.jsonl")
    assert loop.steps == 0
    with pytest.raises(HotloopError, match="jsonl"):
        loop.fit(task.loader(16), progress=False, log="run.txt")
    with pytest.raises(BadArgument, match="an int, which has no `write`"):
        loop.fit(task.loader(16), progress=False, log=[3], save=tmp_path / "run")
    assert loop.steps == 0
    assert not list((tmp_path / "run").glob("[!.]*"))


@pytest.mark.gpu
def test_a_gpu_at_work_is_seen() -> None:
    model = nn.Linear(2048, 2048)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 1e-6), nn.MSELoss(), device="cuda", plan="plain")
    batches = [(torch.randn(4096, 2048, device="cuda"), torch.randn(4096, 2048, device="cuda"))] * 200
    report = loop.fit(batches, epochs=40, progress=False)
    (gpu,) = report.load.gpus
    assert gpu.utilisation > 10
    assert gpu.memory_peak is not None
    assert report.load.joules > 0


# What a run was begun with: run.json

PLAN = Plan("cpu", accumulate=2)


def written(folder: Path, *, resumed: bool = False, **arguments: Any) -> dict[str, Any]:
    write_run(folder, arguments, PLAN, pick("cpu"), resumed=resumed)
    assert [entry.name for entry in folder.iterdir() if "run.json" in entry.name] == ["run.json"]
    return json.loads((folder / "run.json").read_text())


@pytest.fixture
def _no_commit_is_asked_for() -> None:
    """Here it is."""


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = [shutil.which("git") or pytest.skip("needs git"), "-C", str(folder), *who, *words]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    return told.stdout.strip()


class Odd:
    """An object that answers to every name, with an error."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_arguments_are_there_as_far_as_they_are_plain(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    data = written(
        tmp_path,
        endless=endless,
        save=Path("runs/a"),
        every=0.5,
        limit=float("inf"),
        best=("accuracy", "max"),
        metrics={"accuracy": nn.functional.cross_entropy, "odd": Odd()},
        validate=torch.utils.data.DataLoader([1, 2]),
        log=[Odd],
    )
    assert data["arguments"] == {
        "endless": [[[["<list>"]]]],
        "save": str(Path("runs/a")),
        "every": 0.5,
        "limit": None,
        "best": ["accuracy", "max"],
        "metrics": {"accuracy": "<torch.nn.functional.cross_entropy>", "odd": f"<{Odd.__module__}.Odd>"},
        "validate": "<torch.utils.data.dataloader.DataLoader>",
        "log": [f"<{Odd.__module__}.Odd>"],
    }


def test_fit_writes_it_beside_the_checkpoints(task, tmp_path: Path) -> None:
    loop_of(task).fit(task.loader(16), save=tmp_path, progress=False)
    loop_of(task).fit(task.loader(16), epochs=2, save=tmp_path, progress=False, resume=True)
    data = json.loads((tmp_path / "run.json").read_text())
    (again,) = data["resumed"]
    assert (data["arguments"]["epochs"], again["arguments"]["epochs"]) == (1, 2)
    assert data["arguments"]["loader"] == "<torch.utils.data.dataloader.DataLoader>"
    assert data["arguments"]["save"] == str(tmp_path)
    assert "self" not in data["arguments"]
    assert data["plan"]["device"] == data["device"] == "cpu"
    assert (data["seed"], data["device_name"], data["ranks"]) == (0, pick("cpu").name, 1)
    assert data["versions"]["torch"] == torch.__version__
    assert data["host"]


@pytest.mark.parametrize("content", ["mine", '{"epochs": 3}', "[" * 100_000])
def test_a_file_of_somebody_else_stays(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.warns(PlanWarning, match=r"run\.json does not belong to a run and stays as it is"):
        write_run(tmp_path, {}, PLAN, pick("cpu"))
    assert (tmp_path / "run.json").read_text() == content


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(PlanWarning, match=r"cannot write .*run\.json"):
        write_run(tmp_path / "file" / "folder", {}, PLAN, pick("cpu"))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "repository"
    place.mkdir()
    git(place, "init")
    (place / "train.py").write_text("pass\n")
    git(place, "add", "train.py")
    git(place, "commit", "-m", "first")
    monkeypatch.setattr("__main__.__file__", str(place / "train.py"), raising=False)
    return place


def test_the_commit_is_that_of_the_script(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "runs").mkdir()
    data = written(repository / "runs")
    assert data["script"] == str(repository / "train.py")
    assert data["git"] == {"commit": commit, "dirty": False}
    assert written(repository / "runs")["git"]["dirty"] is False, "run.json itself is not a change"
    (repository / "train.py").write_text("changed\n")
    assert written(repository / "runs")["git"] == {"commit": commit, "dirty": True}


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("git", 2.0), FileNotFoundError("git")])
def test_git_that_does_not_answer_is_not_known(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(run_folder.subprocess, "run", fails)
    assert written(tmp_path)["git"] is None
    monkeypatch.setattr(run_folder.shutil, "which", lambda name: None)
    assert written(tmp_path)["git"] is None


def test_a_script_outside_of_any_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("__main__.__file__", str(tmp_path / "train.py"), raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert written(tmp_path)["git"] is None
