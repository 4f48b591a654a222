"""`hotloop demo` as a person runs it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hotloop.cli import main

PLAIN = {"TERM": "dumb", "COLUMNS": "100", "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}  # the poorest terminal
SMALL = ("--device", "cpu", "--epochs", "2", "--points", "200")


def environment() -> dict[str, str]:
    left_out = ("HOTLOOP_DEVICE", "HOTLOOP_DEBUG")
    return (
        {name: value for name, value in os.environ.items() if name not in left_out} | PLAIN | {"OMP_NUM_THREADS": "1"}
    )


def hotloop(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotloop", *args]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120, check=False)


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    code: object
    out: str
    error: str


def run_main(cwd: Path, capsys: pytest.CaptureFixture[str], *args: str) -> Done:
    """The command line in this process, which has torch loaded already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["hotloop", *args])
        with pytest.raises(SystemExit) as ended:
            main()
    printed = capsys.readouterr()
    return Done(ended.value.code, printed.out, printed.err)


def test_it_says_the_device_and_why_then_the_result_then_where_the_files_are(tmp_path: Path) -> None:
    done = hotloop("demo", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {"loss.png", "report.html", "report.json", "spirals.png"}
    order = ["Training on cpu", "You asked for cpu.", "validation accuracy", "report.html", "hotloop device"]
    places = [done.stdout.index(words) for words in order]
    assert places == sorted(places)
    assert f"runs/{folder.name}/report.html" in done.stdout
    assert "epoch 2/2" in done.stderr
    assert "epoch 2/2" not in done.stdout


def test_json_is_one_object_and_nothing_else_is_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(tmp_path, capsys, "demo", *SMALL, "--json", "--out", "first")
    assert done.code == 0, done.error
    data = json.loads(done.out)
    assert data["folder"] == "first"
    assert len(data["epochs"]) == 2
    assert "Training on cpu" in done.error
    assert "epoch 2/2" in done.error


def test_a_folder_with_an_odd_name_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = run_main(tmp_path, capsys, "demo", *SMALL, "--out", "a [bold]run")
    assert "  a [bold]run/report.html" in done.out
    assert (tmp_path / "a [bold]run/report.html").exists()


def test_quiet_prints_the_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(tmp_path, capsys, "demo", *SMALL, "--quiet", "--out", "first")
    assert (done.code, done.out, done.error) == (0, "first\n", "")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--device", "warp"), 2, "warp"),
        (("--epochs", "-1"), 2, "-1 epochs"),
        (("--epochs", "0"), 2, "0 epochs"),
        (("--points", "3"), 2, "3 points"),
        (("--seed", "-1"), 2, "seed -1"),
        (("--out", "file/run"), 2, "Not a directory"),
        (("--out", "full"), 2, "full is not empty"),
    ],
)
def test_a_mistake_ends_in_a_clear_message_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], code: int, words: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    done = run_main(tmp_path, capsys, "demo", "--device", "cpu", *args)
    assert done.code == code
    assert words in done.error
    assert "fix:" in done.error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine.txt"]


def test_an_argument_that_is_no_number_is_told_without_a_traceback(tmp_path: Path) -> None:
    done = hotloop("demo", "--epochs", "many", cwd=tmp_path)
    assert done.returncode == 2
    assert "--epochs" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_keeps_what_was_done(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hotloop", "demo", "--device", "cpu", "--epochs", "100000", "--points", "500"]
    with subprocess.Popen(
        [*command, "--out", "first"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:  # the first line that tells of an epoch: the training is under way
            if "epoch" in line:
                break
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "Stopped by Ctrl-C" in out
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    data = json.loads((tmp_path / "first/report.json").read_text())
    assert data["interrupted"] is True
    assert data["epochs"]
    assert "Stopped by Ctrl-C" in (tmp_path / "first/report.html").read_text(encoding="utf-8")
