"""`hotloop bench` and the person's own file, as a person runs it."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop.cli import main
from hotloop.report.loops import LoopsTimed
from hotloop.report.runs import read_run

pytestmark = pytest.mark.usefixtures("light_heap")
MINE = """
import torch
from torch import nn

import hotloop

x = torch.randn(64, 4)
y = (x.sum(1) > 0).long()


class Net(nn.Linear):
    pass


def build():
    print("built")
    model = Net(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return hotloop.Loop(model, optimizer, nn.CrossEntropyLoss()), list(zip(x.split(16), y.split(16)))


def ending():
    loop, loader = build()
    return hotloop.Loop(
        loop.model,
        loop.optimizers[0],
        nn.CrossEntropyLoss(),
        scheduler=torch.optim.lr_scheduler.OneCycleLR(loop.optimizers[0], 0.1, total_steps=2),
    ), loader


def broken():
    loop, loader = build()
    return loop, [(x, None)]
"""
Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command line in this process and in a folder of its own: exit code, stdout, stderr."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLOOP_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("HOTLOOP_DEBUG", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def bench(*args: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["hotloop", "bench", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    yield bench
    sys.modules.pop("mine", None)


def test_both_loops_are_timed_and_shown(run: Run, tmp_path: Path) -> None:
    code, out, err = run("mine.py:build", "--seconds", "1", "--plot", "speeds.png")
    assert code == 0, err
    assert out.count("built") == 2, "once for each loop"
    for words in ("as in tutorials", "loop.fit", "items/s", "after a warm-up", "speeds.png"):
        assert words in out
    assert "cpu: loop.fit" in err
    assert "HOTLOOP_DEVICE asks for cpu" in err, "why there is no other device"
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")
    (folder,) = (tmp_path / "runs").iterdir()
    kept = read_run(folder).run
    assert (kept.kind, kept.title) == ("bench", "Net")
    assert set(kept.figures) == {"cpu, as in tutorials: items per second", "cpu, loop.fit: items per second"}


def test_json_is_one_object_with_every_repeat(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.replace('print("built")', "pass"))
    code, out, err = run("mine.py:build", "--seconds", "1", "--json", "--no-report", "-d", "cpu")
    assert code == 0, err
    data = json.loads(out)
    assert data.pop("report") is None
    timed = LoopsTimed.from_json(data)
    rows = [(each.device, each.way, len(each.rates)) for each in timed.paces]
    assert rows == [("cpu", "tutorial", 3), ("cpu", "fit", 3)]
    assert not (tmp_path / "runs").exists()


def test_one_loop_that_fails_does_not_end_the_other(run: Run) -> None:
    code, out, err = run("mine.py:ending", "--seconds", "1", "--no-report")
    assert code == 0, err
    assert "as in tutorials on cpu" in out
    assert "OneCycleLR" in out


MISTAKES: dict[str, tuple[Any, str]] = {
    "no function": (("mlp",), "mlp names no function"),
    "no time": (("mine.py:build", "--seconds", "0"), "--seconds 0"),
    "for ever": (("mine.py:build", "--seconds", "inf"), "--seconds inf"),
    "another format": (("mine.py:build", "--plot", "x.jpg"), "x.jpg is not named like one"),
    "no such device": (("mine.py:build", "-d", "warp"), "you asked for 'warp'"),
    "a device that is not here": (("mine.py:build", "-d", "cuda:77"), "cuda:77"),
    "a batch that nothing can train on": (("mine.py:broken", "--seconds", "1"), "cannot be used"),
}


@pytest.mark.parametrize(("args", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_message_and_leaves_nothing(run: Run, tmp_path: Path, args: Any, words: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run(*args)
    assert code in (2, 3)
    assert words in err
    assert "fix:" in err
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before
