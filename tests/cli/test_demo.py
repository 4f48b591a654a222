"""`hotloop demo`: it learns, says what it does, and writes all of its folder or nothing."""

import json
import os
import re
import signal
import sys
import time
from base64 import b64decode
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

from hotloop.apps.sprites.demo import DemoSettings
from hotloop.apps.sprites.making import CLASSES
from hotloop.apps.sprites.network_files import TrainedNetwork
from hotloop.apps.sprites.recipes import Recipe
from hotloop.cli import main

from ..warm import Warm
from .conftest import Run

VERB = ("demo",)
KINDS = ("sword", "heart", "tree")
FILES = {
    *("report.html", "report.json", "sprites.png", "drawn.png", "confusion.png"),
    *("classifier.safetensors", "drawer.safetensors"),
}


@dataclass(frozen=True)
class FirstRun:
    """What a run has written and printed."""

    folder: Path
    page: str
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    """A small run on the CPU with three classes."""
    folder = tmp_path_factory.mktemp("demo") / "a [bold]run"
    options = ["--device", "cpu", "--seed", "3", "--effort", "0.05", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setenv("COLUMNS", "200")
        patch.setattr("hotloop.apps.sprites.demo.ON_A_CPU", KINDS)
        patch.setattr("hotloop.apps.sprites.demo.recipe_for", lambda *_: Recipe(width=8, epochs=1, batch=32, rate=8e-3))
        patch.setattr(sys, "argv", ["hotloop", "demo", *options])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, err.getvalue()
    return FirstRun(folder, (folder / "report.html").read_text(encoding="utf-8"), out.getvalue(), err.getvalue())


def test_it_says_the_device_and_why_then_the_result_then_where_the_files_are(first: FirstRun) -> None:
    assert first.out.startswith("cpu in fp32: You asked for cpu")
    order = ["Learning to sort", "Learning to draw", "Drawing, and judging", "sorted right", "report.html"]
    places = [first.out.index(words) for words in [*order, "hotloop sprites generate"]]
    assert places == sorted(places)
    assert "epoch 1/4" in first.err
    assert "epoch 1/4" not in first.out


def test_everything_is_in_the_folder(first: FirstRun) -> None:
    assert {path.name for path in first.folder.iterdir()} == FILES
    for part in ("sorting sprites", "drawing sprites", "What it draws", "confuses", "You asked for cpu"):
        assert part in first.page
    assert "hotloop demo --device cpu --seed 3 --effort 0.05" in first.page, "what does this run again"
    assert first.data["verdict"]["drawn"] == 4 * len(KINDS)
    assert first.data["interrupted"] is False
    for kind in ("classifier", "drawer"):
        assert TrainedNetwork.load(first.folder / f"{kind}.safetensors").classes == KINDS


def test_the_confusions_are_dark_on_a_dark_page(first: FirstRun) -> None:
    matrix = first.page[first.page.index("What the classifier confuses") :]
    both = re.search(r'prefers-color-scheme: dark\)" srcset="[^,]*,([^"]*)"><img src="[^,]*,([^"]*)"', matrix)
    assert both is not None
    dark, light = (Image.open(BytesIO(b64decode(png))).convert("L").getpixel((2, 2)) for png in both.groups())
    assert dark < 64
    assert light > 192


def test_it_learned_something_even_so(first: FirstRun) -> None:
    sorting, drawing = first.data["classifier"]["curve"], first.data["drawer"]["curve"]
    assert sorting[-1][1] < sorting[0][1]
    assert drawing[-1][1] < 0.8 * drawing[0][1]


def test_a_gpu_takes_all_classes_and_more_sprites() -> None:
    on_gpu, on_cpu = (DemoSettings.of(torch.device(kind), seed=0, effort=1.0) for kind in ("cuda", "cpu"))
    assert on_gpu.classes == CLASSES
    assert set(on_cpu.classes) < set(CLASSES)
    assert on_gpu.sprites > 10 * on_cpu.sprites


MISTAKES = {
    ("--device", "warp"): "warp",
    ("--effort", "0"): "effort 0",
    ("--effort", "-2"): "effort -2",
    ("--effort", "1e9"): "effort 1",
    ("--seed", "-1"): "seed -1",
    ("--out", "file/run"): "cannot write file/run",
    ("--out", "full"): "not empty",
}


@pytest.mark.parametrize(("args", "words"), MISTAKES.items(), ids=map(" ".join, MISTAKES))
def test_a_mistake_ends_in_a_clear_message_and_leaves_nothing(
    run: Run, tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    run("--device", "cpu", *args).assert_told(words)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine.txt"]


ENDLESS = """
import torch._dynamo
from hotloop.apps.sprites import demo
from hotloop.apps.sprites.recipes import Recipe
from hotloop.cli import main

torch._dynamo.config.disable = True  # a long run is worth a compilation, which is not what is looked at here
demo.ON_A_CPU = ("sword", "heart")
learn = demo.learn_to_sort
long = Recipe(width=4, epochs=10_000, batch=64)
demo.learn_to_sort = lambda sprites, held_out, _, **options: learn(sprites, held_out, long, **options)
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_keeps_what_was_done(tmp_path: Path, warm: Warm) -> None:
    """In the poorest terminal, with all words on stderr."""
    script = tmp_path / "hotloop"
    script.write_text(ENDLESS)
    folder, out, err = tmp_path / "folder", tmp_path / "out", tmp_path / "err"
    folder.mkdir()
    command = (script, "demo", "--device", "cpu", "--effort", "0.05", "--json", "--out", "first")
    environment = {**os.environ, "TERM": "dumb", "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"}
    process = warm.start(*command, cwd=folder, environment=environment, out=out, err=err)
    while "epoch 2/10000" not in err.read_text():
        assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    code, error = process.wait(), err.read_text()
    assert code == 130, error
    assert "Traceback" not in error
    assert [path.name for path in folder.iterdir()] == ["first"]
    data = json.loads(out.read_text())
    assert data["folder"] == "first"
    assert data["interrupted"] is True
    assert data["classifier"]["epochs"]
    assert data["drawer"] is None
    assert "Stopped by Ctrl-C" in (folder / "first/report.html").read_text(encoding="utf-8")
