"""`hotloop train` and the person's own file, as a person runs it."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.report.runs import read_run

from ..ranks.conftest import Launch
from ..warm import HOTLOOP, Warm
from .conftest import Run, Terminal

pytestmark = pytest.mark.usefixtures("light_heap")
MINE = """
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop


class Net(nn.Linear):
    pass


class Breaks(Net):
    def forward(self, x):
        return super().forward(x) / {}["missing"]


def build(made=Net):
    torch.manual_seed(0)
    model = made(4, 2)
    x = torch.randn(64, 4)
    y = (x.sum(1) > 0).long()
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    held_out = DataLoader(TensorDataset(x, y), 32)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), plan="plain")
    metrics = {"accuracy": hotloop.metrics.accuracy}
    return loop, loader, {"validate": held_out, "metrics": metrics, "epochs": 2, "monitor": False}


def pressed():
    # somebody presses Ctrl-C in the third step
    loop, loader, settings = build()

    def on_step(step):
        if loop.steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    return loop, loader, {**settings, "on_step": on_step}


def short():
    return build()[:2]


def breaks():
    return build(Breaks)
"""


VERB = ("train",)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setenv("HOTLOOP_DEVICE", "cpu")


def test_it_trains_shows_the_numbers_and_leaves_a_page(run: Run, tmp_path: Path) -> None:
    code, out, err = run("mine.py:build")
    assert code == 0, err
    assert "epoch 2/2" in err
    for words in ("HOTLOOP_DEVICE asks for cpu", "no --save DIR", "hotloop train: Net", "validation accuracy"):
        assert words in out
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"runs/{folder.name}/report.html" in out
    assert "hotloop train mine.py:build" in (folder / "report.html").read_text()
    kept = read_run(folder).run
    assert (kept.kind, kept.title) == ("train", "Net")


def test_options_win_over_what_the_file_gives_and_the_weights_are_kept(run: Run, tmp_path: Path) -> None:
    code, out, err = run("mine.py:build", "--epochs", "3", "--save", "runs/a", "--best", "accuracy", "--log", "l.jsonl")
    assert code == 0, err
    assert "epoch 3/3" in err
    assert "no --save DIR" not in out
    assert "runs/a/report.html" in out
    assert "load_weights(model, 'runs/a')" in out
    assert [place.name for place in (tmp_path / "runs").iterdir()] == ["a"], "one page"
    assert (tmp_path / "l.jsonl").exists()
    best = hotloop.load_weights(nn.Linear(4, 2), tmp_path / "runs/a", "best")
    assert bool(torch.isfinite(best.weight).all())
    assert json.loads((tmp_path / "runs/a/run.json").read_text())["arguments"]["best"] == "accuracy"


def test_json_is_one_object_and_words_go_to_stderr(run: Run, tmp_path: Path) -> None:
    code, out, err = run("mine.py:short", "--json", "--no-report")
    assert code == 0, err
    data = json.loads(out)
    assert (data["save"], data["report"], data["steps"], len(data["epochs"])) == (None, None, 4, 1)
    assert "no --save DIR" in err
    assert not (tmp_path / "runs").exists()


def test_a_time_limit_again_and_again_ends_as_one_run(run: Run, tmp_path: Path) -> None:
    saving = ("mine.py:build", "--save", "run", "--resume", "--json")
    for life in (1, 2):
        code, out, err = run(*saving, "--time-limit", "0.000001s")
        assert (code, json.loads(out)["stopped"], json.loads(out)["steps"]) == (130, "the time limit", life), err
    code, out, err = run(*saving)
    assert (code, json.loads(out)["steps"], json.loads(out)["resumed"]) == (0, 8, 2), err
    assert run("mine.py:build", "--save", "whole", "--no-report")[0] == 0
    parts, whole = (hotloop.load_weights(nn.Linear(4, 2), tmp_path / name) for name in ("run", "whole"))
    assert parts.weight.equal(whole.weight)
    code, _, err = run(*saving[:3])
    assert code == 2
    assert "run holds the checkpoints of an earlier run" in err


def test_ctrl_c_saves_and_says_how_to_go_on(run: Run) -> None:
    code, out, err = run("mine.py:pressed", "--save", "run", "--json")
    assert (code, json.loads(out)["stopped"], json.loads(out)["saved"]) == (130, "Ctrl-C", 3), err
    assert err.count("--resume") == 1
    code, out, err = run("mine.py:build", "--save", "run", "--json", "--resume")
    assert (code, json.loads(out)["steps"]) == (0, 8), err


def test_a_dry_run_tries_everything_first(run: Run) -> None:
    code, out, err = run("mine.py:build", "--dry-run", "2", "--no-report")
    assert code == 0, err
    assert "dry run" in out + err


MISTAKES = {
    "no function": (("mine.py",), 2, "mine.py names no function that builds the loop"),
    "an old spelling": (("sorter",), 2, "FILE.py:FUNCTION"),
    "no epochs": (("mine.py:build", "--epochs", "0"), 2, "--epochs 0"),
    "no time": (("mine.py:build", "--time-limit", "0h"), 2, "'0h' is not a duration"),
    "resume from nowhere": (("mine.py:build", "--resume"), 2, "--resume without --save"),
    "no such metric": (("mine.py:build", "--best", "beauty"), 2, "beauty"),
    "best of nothing": (("mine.py:short", "--best", "accuracy"), 2, "best= without validate="),
    "no such log": (("mine.py:build", "--log", "paper"), 2, "paper"),
    "no such device": (("mine.py:build", "--device", "warp"), 2, "warp"),
    "an error of the model": (("mine.py:breaks",), 2, "mine.py, line 18: KeyError: 'missing'"),
    "more GPUs than there are": (("mine.py:build", "--gpus", "64"), 3, "--gpus 64: torch sees "),
    "a device and GPUs": (("mine.py:build", "--gpus", "2", "--device", "cpu"), 2, "--gpus 2 and --device cpu"),
}


@pytest.mark.parametrize(("args", "code", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_message_and_leaves_nothing(run: Run, tmp_path: Path, args: Any, code: int, words: str):
    before = sorted(tmp_path.rglob("*"))
    run(*args).assert_told(words, code)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_wrong_number_is_told_before_the_file_runs(run: Run) -> None:
    for option in ("--epochs", "--dry-run"):
        code, out, err = run("mine.py:build", option, "0")
        assert (code, out) == (2, "")
        assert err.startswith("hotloop: "), "no word on the device or on --save"
        assert f"{option} 0" in err


def test_ranks_train_as_one_and_speak_once(tmp_path: Path, warm: Warm) -> None:
    command = ("-m", "hotloop.scripts.rank_worker", *HOTLOOP, "train", "mine.py:build", "--save", "run", "--json")
    first, second = Launch(warm, *command, cwd=tmp_path).wait()
    assert (first.code, second.code) == (0, 0), first.err
    assert second.out == ""
    report = json.loads(first.out)
    assert (report["steps"], len(report["by_rank"])) == (4, 2)
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals here")
def test_in_a_terminal_the_bar_goes_on_where_it_was(terminal: Terminal) -> None:
    command = ("train", "mine.py:build", "--epochs", "3000", "--save", "run", "--resume", "--no-report")
    terminal.columns, shown = 150, []
    for until in (r"epoch ([2-9]|\d\d+)/3000", r"\d+/3000 .*items/s"):
        running = terminal.begin(*command)
        terminal.read_until(until)
        terminal.type("\x03")  # Ctrl-C
        assert terminal.end(running) == 130, terminal.plain
        shown.append(" ".join(terminal.plain.split()))
    assert "Traceback" not in shown[0]
    told = re.findall(r"Ctrl-C, at step (\d+), epoch \d+ of 3000; saved in run: resume=True \(`--resume`\)", shown[0])
    assert len(told) == shown[0].count("--resume") == 1, "how to go on is told once"
    assert f"resuming from step {told[0]}, " in shown[1]
    bars = [int(done) for done in re.findall(r"(\d+)/12000", shown[1])]
    assert bars[0] == int(told[0]), "not from the start once more"
    assert bars == sorted(bars)
