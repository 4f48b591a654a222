"""`hotloop sprites train` and `draw` with checkpoints: stopped, resumed, out of time, and in a real terminal."""

import json
import os
import pty
import re
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hotloop.apps.sprites.making import make
from hotloop.cli import main

from ..thorough import tries
from ..warm import Warm

SMALL = ("--width", "4", "--batch", "16", "--device", "cpu", "--no-report")


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The command line in this process and in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("hotloop.tune.tuner.WORTH_A_PLAN", 60.0)  # runs are compared to the bit
    monkeypatch.setattr("hotloop.tune.tuner.WORTH_ON_CPU", 10**6)
    make(160, seed=7, classes=["sword", "heart"]).save(tmp_path / "sprites.safetensors")

    def call(*args: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["hotloop", "sprites", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call


@pytest.mark.parametrize(("task", "epochs", "every"), [("train", 2, "all 2 epochs were"), ("draw", 1, "the epoch was")])
def test_a_time_limit_again_and_again_ends_as_one_run(run, tmp_path: Path, task: str, epochs: int, every: str) -> None:
    command = (task, "sprites.safetensors", "--epochs", str(epochs), *SMALL)
    code, _, err = run(*command, "--out", "whole.safetensors")
    assert code == 0, err
    saving = ("--out", "parts.safetensors", "--save", "run", "--every", "3 steps", "--resume", "--json")
    lives = 3 if task == "train" else tries(1, 3)
    for life in range(1, lives + 1):
        code, out, err = run(*command, *saving, "--time-limit", "0.000001s")
        report = json.loads(out)
        assert code == 130
        assert (report["stopped"], report["steps"], report["saved"]) == ("the time limit", life, life)
        (told,) = [line for line in " ".join(err.split()).split("ended early: ")[1:] if "resume" in line]
        assert told == (
            f"the time limit, at step {life}, epoch 1 of {epochs}; saved in run: "
            "resume=True (`--resume`) continues from there"
        )
        if life > 1:
            assert f"resuming from step {life - 1}, in epoch 1 of {epochs}, after batch {life - 1} of 9" in err
    code, out, err = run(*command, *saving)
    assert code == 0, err
    assert (json.loads(out)["steps"], json.loads(out)["resumed"]) == (9 * epochs, lives)
    whole, parts = load_file(tmp_path / "whole.safetensors"), load_file(tmp_path / "parts.safetensors")
    assert whole.keys() == parts.keys()
    assert all(tensor.equal(parts[name]) for name, tensor in whole.items())
    code, out, err = run(*command, *saving)
    assert (code, json.loads(out)["steps"]) == (0, 9 * epochs)
    assert f"{every} done at step {9 * epochs}: nothing is left to train" in err


def test_more_epochs_go_on(run) -> None:
    command = ("train", "sprites.safetensors", *SMALL, "--save", "run", "--json")
    assert run(*command, "--epochs", "1")[0] == 0
    code, out, err = run(*command, "--epochs", "3", "--resume")
    assert code == 0, err
    assert json.loads(out)["steps"] == 27


def test_a_run_that_is_saved_has_one_page(run, tmp_path: Path) -> None:
    command = ("train", "sprites.safetensors", *SMALL, "--epochs", "1", "--report", "--save", "runs/a", "--json")
    code, out, err = run(*command)
    assert code == 0, err
    assert Path(json.loads(out)["report"]) == Path("runs/a/report.html")
    assert list((tmp_path / "runs").rglob("report.html")) == [tmp_path / "runs/a/report.html"]


MISTAKES = {
    "no unit": (("--save", "run", "--every", "300"), "'300' is not a duration"),
    "milliseconds": (("--save", "run", "--every", "500ms"), "'500ms' is not a duration"),
    "never": (("--save", "run", "--every", "0 steps"), "'0 steps' is not a duration"),
    "no time at all": (("--time-limit", "0h"), "'0h' is not a duration"),
    "resume from nowhere": (("--resume",), "--resume without --save"),
}


@pytest.mark.parametrize(("args", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_in_a_clear_message_and_leaves_nothing(run, tmp_path: Path, args, says: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("train", "sprites.safetensors", *SMALL, "--epochs", "1", *args)
    assert code == 2
    assert says in err
    assert "fix:" in err
    assert out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_takes_no_checkpoints_is_told_before_the_training(run) -> None:
    code, out, err = run("train", "sprites.safetensors", *SMALL, "--save", "sprites.safetensors")
    assert code == 2
    assert "checkpoints cannot be written to sprites.safetensors: File exists" in err
    assert "epoch 1" not in out + err


def test_a_folder_with_a_run_in_it_is_not_written_over(run) -> None:
    command = ("train", "sprites.safetensors", *SMALL, "--epochs", "1", "--save", "run")
    code, out, _ = run(*command)
    assert code == 0
    assert "to learn from, 1 epoch\n" in out
    code, _, err = run(*command)
    assert code == 2
    assert "run holds the checkpoints of an earlier run, the last of step 9" in err
    assert "`--resume`" in err


def in_a_terminal(warm: Warm, folder: Path, *args: str, until: str) -> tuple[int, str]:
    """A command in a pseudo-terminal of its own; once it has shown `until`, somebody presses Ctrl-C."""
    leader, follower = pty.openpty()
    script = folder / "hotloop"
    # On a slow machine the run is long enough for a compilation beside it, which is not what is looked at here.
    script.write_text("import torch._dynamo, hotloop.cli\ntorch._dynamo.config.disable = True\nhotloop.cli.main()\n")
    environment = {**os.environ, "COLUMNS": "150", "TERM": "xterm-256color"}
    process = warm.start(script, "sprites", *args, cwd=folder, environment=environment, terminal=os.ttyname(follower))
    os.close(follower)
    shown, pressed = b"", False
    while True:
        try:
            shown += os.read(leader, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not pressed and re.search(until, plain(shown)):
            os.killpg(process.pid, signal.SIGINT)
            pressed = True
    os.close(leader)
    return process.wait(), plain(shown)


def plain(shown: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))


def test_in_a_terminal_the_bar_goes_on_where_it_was(tmp_path: Path, warm: Warm) -> None:
    make(160, seed=7, classes=["sword", "heart"]).save(tmp_path / "sprites.safetensors")
    command = ("train", "sprites.safetensors", "--epochs", "60", *SMALL, "--save", "run", "--resume")
    code, shown = in_a_terminal(warm, tmp_path, *command, until=r"epoch ([2-9]|\d\d)/60")
    assert code == 130, shown
    assert "Traceback" not in shown
    ending = r"ended early: Ctrl-C, at step (\d+), epoch \d+ of 60; saved in run: resume=True \(`--resume`\) continues"
    told = re.findall(ending, " ".join(shown.split()))
    assert len(told) == shown.count("--resume") == 1, "how to go on is told once"
    steps = int(told[0])
    code, shown = in_a_terminal(warm, tmp_path, *command, until=r"epoch \d+/60 .*items/s")
    assert code == 130, shown
    assert f"resuming from step {steps}, " in shown
    bars = [int(done) for done in re.findall(r"(\d+)/540", shown)]
    assert bars[0] == steps, "not from the start once more"
    assert bars == sorted(bars)


@pytest.mark.parametrize(
    "given", [["--class", "sword"], ["--class", "sword", "--class", "sword"]], ids=["once", "twice"]
)
def test_a_classifier_of_one_class_is_refused_before_it_is_trained(run, tmp_path: Path, given: list[str]) -> None:
    code, _, err = run("train", *given, *SMALL)
    assert code == 2
    assert "a classifier has nothing to tell it apart from" in " ".join(err.split())
    assert [file.name for file in tmp_path.iterdir()] == ["sprites.safetensors"]
