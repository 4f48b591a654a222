"""The demo: it learns, it is the same each time, and it writes all of its folder or nothing."""

import json
import re
import sys
from base64 import b64decode
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hotloop.apps.sprites.demo import DemoSettings, run_demo
from hotloop.apps.sprites.making import CLASSES
from hotloop.apps.sprites.network_files import TrainedNetwork
from hotloop.apps.sprites.recipes import Recipe
from hotloop.cli import main
from hotloop.errors import BadArgument, OutputError

KINDS = ("sword", "heart", "tree")
FILES = {
    "report.html",
    "report.json",
    "sprites.png",
    "drawn.png",
    "confusion.png",
    "loss-sorting.png",
    "loss-drawing.png",
    "classifier.safetensors",
    "drawer.safetensors",
}


@dataclass(frozen=True)
class FirstRun:
    """What a run has written and printed."""

    folder: Path
    page: str
    out: str
    told: str

    @property
    def data(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    """A small run on the CPU with three classes, by the command line."""
    folder = tmp_path_factory.mktemp("demo") / "a [bold]run"
    options = ["--device", "cpu", "--seed", "3", "--effort", "0.05", "--json", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as told:
        patch.setattr("hotloop.apps.sprites.demo.ON_A_CPU", KINDS)
        patch.setattr("hotloop.apps.sprites.demo.recipe_for", lambda *_: Recipe(width=8, epochs=1, batch=32, rate=8e-3))
        patch.setattr(sys, "argv", ["hotloop", "demo", *options])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, told.getvalue()
    return FirstRun(folder, (folder / "report.html").read_text(encoding="utf-8"), out.getvalue(), told.getvalue())


def test_it_says_the_device_and_why_before_anything_else(first: FirstRun) -> None:
    assert first.told.startswith("cpu in fp32: You asked for cpu")
    places = [first.told.index(words) for words in ("Learning to sort", "Learning to draw", "Drawing, and judging")]
    assert places == sorted(places)
    assert "epoch 1/4" in first.told


def test_json_is_one_object_and_nothing_else_is_on_stdout(first: FirstRun) -> None:
    data = json.loads(first.out)
    assert data["folder"] == str(first.folder)
    assert data["verdict"]["drawn"] > 0


def test_everything_is_in_the_folder(first: FirstRun) -> None:
    assert {path.name for path in first.folder.iterdir()} == FILES
    for part in ("sorting sprites", "drawing sprites", "What it draws", "confuses", "You asked for cpu"):
        assert part in first.page
    assert "hotloop demo --device cpu --seed 3 --effort 0.05" in first.page, "what does this run again"
    data = first.data
    assert data["classifier"]["steps"] > 0
    assert data["drawer"]["steps"] > 0
    assert data["verdict"]["drawn"] == 4 * len(data["classes"]) == 12
    assert data["interrupted"] is False


def test_the_confusions_are_dark_on_a_dark_page(first: FirstRun) -> None:
    matrix = first.page[first.page.index("What the classifier confuses") :]
    dark, light = re.search(
        r'prefers-color-scheme: dark\)" srcset="[^,]*,([^"]*)"><img src="[^,]*,([^"]*)"', matrix
    ).groups()
    grounds = [Image.open(BytesIO(b64decode(png))).convert("L").getpixel((2, 2)) for png in (dark, light)]
    assert grounds[0] < 64
    assert grounds[1] > 192


def test_it_learned_something_even_so(first: FirstRun) -> None:
    sorting, drawing = first.data["classifier"]["curve"], first.data["drawer"]["curve"]
    assert sorting[-1][1] < sorting[0][1]
    assert drawing[-1][1] < 0.8 * drawing[0][1]


def test_the_networks_can_be_used_afterwards(first: FirstRun) -> None:
    drawer = TrainedNetwork.load(first.folder / "drawer.safetensors", "drawer")
    assert drawer.classes == KINDS
    assert TrainedNetwork.load(first.folder / "classifier.safetensors", "classifier").classes == drawer.classes


def test_a_gpu_takes_all_classes_and_more_sprites() -> None:
    on_gpu = DemoSettings.of(torch.device("cuda"), seed=0, effort=1.0)
    on_cpu = DemoSettings.of(torch.device("cpu"), seed=0, effort=1.0)
    assert on_gpu.classes == CLASSES
    assert set(on_cpu.classes) < set(CLASSES)
    assert on_gpu.sprites > 10 * on_cpu.sprites


@pytest.mark.parametrize(("seed", "effort"), [(-1, 1.0), (0, 0.0), (0, -2.0), (0, 1e9)])
def test_settings_that_cannot_be_meant_leave_nothing(tmp_path: Path, seed: int, effort: float) -> None:
    with pytest.raises(BadArgument, match="fix:"):
        run_demo(tmp_path / "out", device="cpu", seed=seed, effort=effort)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError):
        run_demo(tmp_path / "file" / "run", device="cpu", effort=0.1, tell=lambda words: None)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
