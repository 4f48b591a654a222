"""`hotloop tune` as a person runs it."""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import hotloop
from hotloop.cli import main
from hotloop.plan import Plan, Tuning
from hotloop.report.runs import read_run

pytestmark = pytest.mark.usefixtures("light_heap")
MINE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from beside import FEATURES

answer = 42


def build():
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 1)
    x = torch.randn(64, FEATURES)
    loader = DataLoader(TensorDataset(x, x[:, :1]), 16, shuffle=True)
    return hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss()), loader


def alone():
    return build()[0]


def words():
    return "a loop"


def spent():
    loop, loader = build()
    return loop, iter(loader)


def odd():
    return *build(), [3]


def strange():
    return *build(), {"epoch": 3}


def broken():
    return 1 / 0
"""
SMALL = ("mine.py:build", "--steps", "5", "--device", "cpu")


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    code: object
    out: str
    error: str


Run = Callable[..., Done]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("FEATURES = 4\n")
    (tmp_path / "notes.txt").write_text("no Python")
    (tmp_path / "full").mkdir()
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command line in this process, which has torch loaded already; what it leaves in the process is undone."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("HOTLOOP_DEBUG", raising=False)
    monkeypatch.setenv("HOTLOOP_DEVICE", "")  # so that what --device sets is taken back
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def tune(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["hotloop", "tune", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Done(ended.value.code, printed.out, printed.err)

    yield tune
    for name in ("mine", "beside"):
        sys.modules.pop(name, None)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def found(**changes: Any) -> Tuning:
    """A tuning as if it had been made."""
    known: dict[str, Any] = {
        "plan": Plan("cpu", fused=True),
        "trials": (),
        "plain_step": 2e-3,
        "step": 1e-3,
        "steps": 5,
        "seconds": 1.0,
        "device_name": "a CPU",
        "model": "Linear",
        "made": "2026-01-01T00:00:00+00:00",
        "versions": {},
    }
    return Tuning(**known | changes)


def test_the_plan_is_written_for_a_loop_to_take_and_the_way_to_it_is_drawn(folder: Path, run: Run) -> None:
    before = names(folder)
    done = run(*SMALL, "--out", "my plan.json", "--plot", "way.png")
    assert done.code == 0, done.error
    (kept,) = (folder / "runs").iterdir()
    assert names(folder) - before == {"my plan.json", "way.png", "runs", kept.name, "report.html", "report.json"}
    assert read_run(kept).run.title == "Linear"
    assert (folder / "way.png").read_bytes().startswith(b"\x89PNG")
    tuning = Tuning.from_json(json.loads((folder / "my plan.json").read_text()))
    assert tuning.steps == 5
    assert tuning.model == "Linear"
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan=str(folder / "my plan.json"))
    assert loop.plan == tuning.plan
    for words in ("HOTLOOP_DEVICE asks for cpu", "plain loop", "resident", "the plan", "my plan.json"):
        assert words in done.out
    assert done.error == ""


def test_json_is_one_object_and_progress_goes_to_stderr(folder: Path, run: Run) -> None:
    done = run(*SMALL, "--json", "--no-report")
    assert done.code == 0, done.error
    data = json.loads(done.out)
    assert data.pop("out") == "plan.json"
    assert data.pop("report") is None
    assert not (folder / "runs").exists()
    assert data == json.loads((folder / "plan.json").read_text())
    assert {"resident", "fused", "compile"} <= {trial["lever"] for trial in data["trials"]}
    assert "HOTLOOP_DEVICE asks for cpu" in done.error


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("vgg",), "vgg names no function that builds the loop"),
        (("mine.py",), "FILE.py:FUNCTION, a function that returns (loop, loader), as in mine.py:build"),
        (("absent.py:build",), "there is no file absent.py"),
        (("notes.txt:build",), "notes.txt is not a Python file"),
        (("mine.py:absent",), "mine.py has no function 'absent'"),
        (("mine.py:answer",), "mine.py has no function 'answer'"),
        (("mine.py:biuld",), "name the one that builds, out of: build, alone, words"),
        (("mine.py:words",), "words() returned a str"),
        (("mine.py:alone",), "alone() returned a Loop"),
        (("mine.py:spent",), "can be read only once"),
        (("mine.py:broken",), "mine.py, line 42: ZeroDivisionError"),
        (("mine.py:build", "--steps", "0"), "steps=0"),
        (("mine.py:build", "--seconds", "nan"), "seconds=nan"),
        (("mine.py:build", "--seconds", "inf"), "seconds=inf"),
        (("mine.py:build", "--plot", "way.jpg"), "way.jpg is not named like one"),
        (("mine.py:build", "--plot", "plan.json"), "the same file"),
        (("mine.py:build", "--steps", "5", "--seconds", "5"), "both --steps and --seconds"),
        (("mine.py:build", "--out", "absent/plan.json"), "there is no folder absent"),
        (("mine.py:build", "--out", "full"), "full is a folder"),
        (("mine.py:build", "--plot", "absent/way.png"), "there is no folder absent"),
        (("mine.py:build", "--device", "warp"), "you asked for 'warp'"),
        (("mine.py:odd",), "the third that odd() returned is a list"),
        (("mine.py:strange",), "strange() returned 'epoch', which `Loop.fit` does not take"),
    ],
)
def test_a_mistake_is_one_clear_message_and_leaves_everything(
    folder: Path, run: Run, args: tuple[str, ...], words: str
) -> None:
    (folder / "plan.json").write_text("the old plan")
    before = names(folder)
    done = run(*args, *(() if "--device" in args else ("--device", "cpu")))
    assert done.code == 2
    assert words in done.error
    what, fix = done.error.splitlines()
    assert what.startswith("hotloop: ")
    assert fix.startswith("  fix: ")
    assert done.out == "" or "HOTLOOP_DEVICE asks for cpu" in done.out  # said before the loader was looked at
    assert names(folder) == before
    assert (folder / "plan.json").read_text() == "the old plan"


def test_a_file_gets_no_arguments_of_the_command(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotloop.Loop, "tune", lambda *_, **__: found())
    parses = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--size', {})\n"
    (folder / "mine.py").write_text(parses.format("default=1") + "parser.parse_args()\n" + MINE)
    done = run(*SMALL)
    assert done.code == 0, done.error
    (kept,) = (folder / "runs").iterdir()
    assert "hotloop tune mine.py:build" in (kept / "report.html").read_text()
    (folder / "mine.py").write_text(parses.format("required=True") + "parser.parse_args()\n" + MINE)
    done = run(*SMALL)
    assert done.code == 2
    assert "hotloop: mine.py, line 4: SystemExit: 2\n  fix: hotloop imports it without arguments" in done.error


def test_a_place_that_may_not_be_written_is_told_before_any_work(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # also for an administrator, who may write anywhere
    done = run("absent.py:build")
    assert done.code == 2
    assert "is not writable" in done.error
    assert "Traceback" not in done.error


def test_a_disk_that_is_full_leaves_the_old_plan_and_no_scraps(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    (folder / "plan.json").write_text("the old plan")
    before = names(folder)
    monkeypatch.setattr(hotloop.Loop, "tune", lambda *_, **__: found())
    monkeypatch.setattr(os, "fsync", full)
    done = run(*SMALL)
    assert done.code == 2
    assert "cannot write plan.json: No space left on device" in done.error
    assert "Traceback" not in done.error
    assert names(folder) == before
    assert (folder / "plan.json").read_text() == "the old plan"


@pytest.mark.parametrize(
    ("args", "steps", "seconds"),
    [((), None, 3600), (("--steps", "7"), 7, None), (("--seconds", "60"), None, 60)],
)
def test_a_plan_is_for_a_run_of_a_length(
    run: Run, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], steps: int | None, seconds: float | None
) -> None:
    asked: dict[str, Any] = {}

    def tune(loop: hotloop.Loop, loader: Any, **options: Any) -> Tuning:
        asked.update(options, device=loop.device.type, items=len(loader.dataset))
        return found()

    monkeypatch.setattr(hotloop.Loop, "tune", tune)
    done = run("mine.py:build", "-d", "cpu", *args)
    assert done.code == 0, done.error
    assert asked == {"steps": steps, "seconds": seconds, "device": "cpu", "items": 64}


def test_nobody_is_said_to_have_asked_for_the_device_that_was_picked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotloop.Loop, "tune", lambda *_, **__: found())
    done = run("mine.py:build", "--no-report")
    assert done.code == 0, done.error
    assert hotloop.pick().reason.split(":")[0] in " ".join(done.out.split())
    assert "asked for" not in done.out


def test_the_help_teaches_by_examples(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    for words in ("Examples", "hotloop tune train.py:build --steps 20000", "--plot", "pays back"):
        assert words in " ".join(done.out.split())
