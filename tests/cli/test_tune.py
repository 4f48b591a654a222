"""`hotloop tune` as a person runs it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.plan import Plan, Tuning
from hotloop.report.runs import read_run

from .conftest import Run

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


VERB = ("tune",)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("FEATURES = 4\n")
    (tmp_path / "notes.txt").write_text("no Python")
    (tmp_path / "full").mkdir()
    monkeypatch.setenv("HOTLOOP_DEVICE", "")  # so that what --device sets is taken back
    return tmp_path


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


def test_the_plan_is_written_for_a_loop_to_take_and_the_run_is_kept(folder: Path, run: Run) -> None:
    before = names(folder)
    done = run(*SMALL, "--out", "my plan.json")
    assert done.code == 0, done.err
    (kept,) = (folder / "runs").iterdir()
    assert names(folder) - before == {"my plan.json", "runs", kept.name, "report.html", "report.json"}
    assert read_run(kept).run.title == "Linear"
    tuning = Tuning.from_json(json.loads((folder / "my plan.json").read_text()))
    assert (tuning.steps, tuning.model) == (5, "Linear")
    assert {"resident", "fused", "compile"} <= {trial.lever for trial in tuning.trials}
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan=str(folder / "my plan.json"))
    assert loop.plan == tuning.plan
    for words in ("HOTLOOP_DEVICE asks for cpu", "plain loop", "resident", "the plan", "my plan.json"):
        assert words in done.out
    assert done.err == ""


def test_json_is_one_object_and_progress_goes_to_stderr(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotloop.Loop, "tune", lambda *_, **__: found())
    done = run(*SMALL, "--json", "--no-report")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"out": "plan.json", "report": None, **json.loads(Path("plan.json").read_text())}
    assert not (folder / "runs").exists()
    assert "HOTLOOP_DEVICE asks for cpu" in done.err


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
        (("mine.py:build", "--steps", "5", "--seconds", "5"), "both --steps and --seconds"),
        (("mine.py:build", "--out", "absent/plan.json"), "there is no folder absent"),
        (("mine.py:build", "--out", "full"), "full is a folder"),
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
    done.assert_told(words)
    what, fix = done.err.splitlines()
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
    assert done.code == 0, done.err
    (kept,) = (folder / "runs").iterdir()
    assert "hotloop tune mine.py:build" in (kept / "report.html").read_text()
    (folder / "mine.py").write_text(parses.format("required=True") + "parser.parse_args()\n" + MINE)
    done = run(*SMALL)
    assert done.code == 2
    assert "hotloop: mine.py, line 4: SystemExit: 2\n  fix: hotloop imports it without arguments" in done.err


def test_a_place_that_may_not_be_written_is_told_before_any_work(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # also for an administrator, who may write anywhere
    run("absent.py:build").assert_told("is not writable")


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
    assert done.code == 0, done.err
    assert asked == {"steps": steps, "seconds": seconds, "device": "cpu", "items": 64}


def test_nobody_is_said_to_have_asked_for_the_device_that_was_picked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotloop.Loop, "tune", lambda *_, **__: found())
    done = run("mine.py:build", "--no-report")
    assert done.code == 0, done.err
    assert hotloop.pick().reason.split(":")[0] in " ".join(done.out.split())
    assert "asked for" not in done.out
