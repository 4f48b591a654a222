"""`hotloop bench` and the person's own file, as a person runs it."""

import json
from pathlib import Path
from typing import Any

import pytest

from hotloop.report.loops import LoopsTimed
from hotloop.report.runs import read_run

from .conftest import Run

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


VERB = ("bench",)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setenv("HOTLOOP_DEVICE", "cpu")


def test_both_loops_are_timed_and_shown(run: Run, tmp_path: Path) -> None:
    code, out, err = run("mine.py:build", "--seconds", "0.3")
    assert code == 0, err
    assert out.count("built") == 2, "once for each loop"
    for words in ("as in tutorials", "loop.fit", "items/s", "after a warm-up", "The page: "):
        assert words in out
    assert "cpu: loop.fit" in err
    assert "HOTLOOP_DEVICE asks for cpu" in err, "why there is no other device"
    (folder,) = (tmp_path / "runs").iterdir()
    kept = read_run(folder).run
    assert (kept.kind, kept.title) == ("bench", "Net")
    assert set(kept.figures) == {"cpu, as in tutorials: items per second", "cpu, loop.fit: items per second"}


def test_json_is_one_object_with_every_repeat_and_one_loop_may_fail(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.replace('print("built")', "pass"))
    code, out, err = run("mine.py:ending", "--seconds", "0.3", "--json", "--no-report", "-d", "cpu")
    assert code == 0, err
    data = json.loads(out)
    assert data.pop("report") is None
    timed = LoopsTimed.from_json(data)
    assert [(each.device, each.way, len(each.rates)) for each in timed.paces] == [
        ("cpu", "tutorial", 3),
        ("cpu", "fit", 0),
    ]
    assert "OneCycleLR" in out
    assert not (tmp_path / "runs").exists()


MISTAKES: dict[str, tuple[Any, str]] = {
    "no function": (("mlp",), "mlp names no function"),
    "no time": (("mine.py:build", "--seconds", "0"), "--seconds 0"),
    "for ever": (("mine.py:build", "--seconds", "inf"), "--seconds inf"),
    "a device that is not here": (("mine.py:build", "-d", "cuda:77"), "cuda:77"),
    "a batch that nothing can train on": (("mine.py:broken", "--seconds", "0.3"), "cannot be used"),
}


@pytest.mark.parametrize(("args", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_message_and_leaves_nothing(run: Run, tmp_path: Path, args: Any, words: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    run(*args).assert_told(words, code=3 if "cuda:77" in args else 2)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_is_not_there_is_told_before_anything_is_timed(run: Run) -> None:
    code, out, err = run("nope.py:build")
    assert (code, out) == (2, "")
    assert err.startswith("hotloop: there is no file nope.py"), "no word on the device"
