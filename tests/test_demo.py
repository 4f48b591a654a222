"""The demo: it learns, it is the same each time, and it writes all of its folder or nothing."""

import json
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from hotloop.demo import DemoSettings, run_demo
from hotloop.errors import BadArgument, OutputError
from hotloop.sprites.making import CLASSES
from hotloop.sprites.store import TrainedNetwork
from hotloop.sprites.training import Recipe

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


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory):
    """A small run on the CPU, and what it told."""
    told: list[str] = []
    out = tmp_path_factory.mktemp("demo") / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotloop.demo.recipe_for", lambda *_: Recipe(width=8, epochs=1, batch=64, rate=8e-3))
        outcome = run_demo(out, device="cpu", seed=3, effort=0.05, progress=False, tell=told.append)
    return outcome, told


def test_it_says_the_device_and_why_before_anything_else(first) -> None:
    _, told = first
    assert told[0].startswith("cpu in fp32: You asked for cpu")
    assert [words.split()[0] for words in told[1:]] == ["Learning", "Learning", "Drawing,"]


def test_everything_is_in_the_folder(first) -> None:
    outcome, _ = first
    assert {path.name for path in outcome.folder.iterdir()} == FILES
    page = (outcome.folder / "report.html").read_text(encoding="utf-8")
    for part in ("sorting sprites", "drawing sprites", "What it draws", "confuses", "You asked for cpu"):
        assert part in page
    assert "hotloop demo --device cpu --seed 3 --effort 0.05" in page, "what does this run again"
    data = json.loads((outcome.folder / "report.json").read_text())
    assert data["classifier"]["steps"] > 0
    assert data["drawer"]["steps"] > 0
    assert data["verdict"]["drawn"] == 4 * len(data["classes"])
    assert data["interrupted"] is False


def test_the_confusions_are_dark_on_a_dark_page(first) -> None:
    outcome, _ = first
    page = (outcome.folder / "report.html").read_text(encoding="utf-8")
    matrix = page[page.index("What the classifier confuses") :]
    dark, light = re.search(
        r'prefers-color-scheme: dark\)" srcset="[^,]*,([^"]*)"><img src="[^,]*,([^"]*)"', matrix
    ).groups()
    grounds = [Image.open(BytesIO(b64decode(png))).convert("L").getpixel((2, 2)) for png in (dark, light)]
    assert grounds[0] < 64
    assert grounds[1] > 192


def test_it_learned_something_even_so(first) -> None:
    outcome, _ = first
    assert outcome.sorting.curve[-1][1] < outcome.sorting.curve[0][1]
    assert outcome.drawing.curve[-1][1] < 0.8 * outcome.drawing.curve[0][1]


def test_the_networks_can_be_used_afterwards(first) -> None:
    outcome, _ = first
    drawer = TrainedNetwork.load(outcome.folder / "drawer.safetensors", "drawer")
    assert drawer.classes == outcome.settings.classes
    assert TrainedNetwork.load(outcome.folder / "classifier.safetensors", "classifier").classes == drawer.classes


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
