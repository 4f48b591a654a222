"""`hotloop demo` as a person runs it; with `--json` in `tests/test_demo.py`."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hotloop.cli import main

from ..warm import HOTLOOP, Warm

PLAIN = {"TERM": "dumb", "COLUMNS": "100", "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"}  # the poorest terminal
SMALL = ("--device", "cpu", "--effort", "0.05")
TINY = """
from hotloop.apps.sprites import demo
from hotloop.cli import main
from hotloop.apps.sprites.recipes import Recipe

demo.ON_A_CPU = ("sword", "heart")
demo.recipe_for = lambda *_: Recipe(width=4, epochs=1, batch=64)  # learns nothing
{more}
main()
"""
ENDLESS = """
import torch._dynamo
torch._dynamo.config.disable = True  # a long run is worth a compilation, which is not what is looked at here
learn = demo.learn_to_sort
long = Recipe(width=4, epochs=10_000, batch=64)
demo.learn_to_sort = lambda sprites, held_out, _, **options: learn(sprites, held_out, long, **options)
"""


def environment() -> dict[str, str]:
    left_out = ("HOTLOOP_DEVICE", "HOTLOOP_DEBUG")
    return {name: value for name, value in os.environ.items() if name not in left_out} | PLAIN


def tiny(folder: Path, more: str = "") -> Path:
    """`hotloop` as a script whose networks are tiny."""
    script = folder / "hotloop"
    script.write_text(TINY.format(more=more))
    return script


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


def test_it_says_the_device_and_why_then_the_result_then_where_the_files_are(tmp_path: Path, warm: Warm) -> None:
    done = warm.run(tiny(tmp_path), "demo", *SMALL, cwd=tmp_path, environment=environment())
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    order = ["cpu in fp32: You asked for cpu.", "Learning to sort", "Learning to draw", "sorted right", "report.html"]
    places = [done.stdout.index(words) for words in [*order, "hotloop sprites generate"]]
    assert places == sorted(places)
    assert f"runs/{folder.name}/report.html" in done.stdout
    assert "epoch 1/4" in done.stderr
    assert "epoch 1/4" not in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--device", "warp"), 2, "warp"),
        (("--effort", "0"), 2, "effort 0"),
        (("--effort", "-2"), 2, "effort -2"),
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


def test_an_argument_that_is_no_number_is_told_without_a_traceback(tmp_path: Path, warm: Warm) -> None:
    done = warm.run(*HOTLOOP, "demo", "--effort", "much", cwd=tmp_path, environment=environment())
    assert done.returncode == 2
    assert "--effort" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_keeps_what_was_done(tmp_path: Path, warm: Warm) -> None:
    script = tiny(tmp_path, ENDLESS)
    folder, out, err = tmp_path / "folder", tmp_path / "out", tmp_path / "err"
    folder.mkdir()
    command = (script, "demo", *SMALL, "--out", "first")
    process = warm.start(*command, cwd=folder, environment=environment(), out=out, err=err)
    while "epoch 2/10000" not in err.read_text():
        assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    code, out, error = process.wait(), out.read_text(), err.read_text()
    assert code == 130, error
    assert "Traceback" not in error
    assert "Stopped by Ctrl-C" in out
    assert [path.name for path in folder.iterdir()] == ["first"]
    data = json.loads((folder / "first/report.json").read_text())
    assert data["interrupted"] is True
    assert data["classifier"]["epochs"]
    assert data["drawer"] is None
    assert "Stopped by Ctrl-C" in (folder / "first/report.html").read_text(encoding="utf-8")
