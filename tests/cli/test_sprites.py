"""`hotloop sprites` as a person runs them, good input and bad."""

import json
import shlex
from pathlib import Path

import pytest
from PIL import Image

from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.models import Drawer, Size
from hotloop.apps.sprites.network_files import TrainedNetwork
from hotloop.apps.sprites.palette import palette_tensor

from .conftest import Run


def picture(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.copy()


def test_a_preview_counts_the_sprites_that_there_are(run, tmp_path: Path) -> None:
    run("sprites", "make", "-n", "6", "-c", "sword", "-c", "gem")
    code, out, _ = run("sprites", "preview", "sprites.safetensors", "--scale", "1")
    assert code == 0
    assert out.startswith("6 sprites, a row for each of 2 classes")
    assert picture(tmp_path / "preview.png").width < 4 * 18, "three in a row, and none twice"
    assert '"shown": 6' in run("sprites", "preview", "sprites.safetensors", "--json")[1]


def test_the_next_command_works_as_printed_whatever_the_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my art").mkdir()
    out = run("sprites", "make", "-n", "8", "-c", "sword", "-c", "gem", "-o", "my art/two.safetensors").out
    assert run(*shlex.split(out.split("`")[1])[1:]).code == 0


def test_from_nothing_to_a_sheet_of_new_sprites(run, tmp_path: Path) -> None:
    code, out, err = run("sprites", "make", "-n", "256", "-c", "sword", "-c", "heart", "--seed", "7")
    assert code == 0, err
    assert "256 sprites of 2 classes" in out
    sprites = SpriteSet.load(tmp_path / "sprites.safetensors")
    assert sprites.classes == ("sword", "heart")

    code, out, _ = run("sprites", "preview", "sprites.safetensors", "--columns", "5", "--scale", "2", "--json")
    assert json.loads(out)["classes"] == {"sword": 128, "heart": 128}
    assert picture(tmp_path / "preview.png").width > 5 * 16 * 2

    small = ("--epochs", "1", "--device", "cpu")
    code, out, err = run("sprites", "train", "sprites.safetensors", *small, "--no-report", "--json")
    assert code == 0, err
    assert json.loads(out)["classes"] == ["sword", "heart"]
    assert "You asked for cpu" in err
    code, out, err = run("sprites", "draw", "sprites.safetensors", *small)
    assert code == 0, err
    assert "hotloop sprites generate --model drawer.safetensors" in out
    (folder,) = (tmp_path / "runs").glob("*")
    assert f"{folder.name}/report.html" in out

    code, out, _ = run("sprites", "evaluate", "classifier.safetensors", "-d", "cpu", "-n", "64", "--json")
    assert code == 0
    assert json.loads(out)["sprites"] == 64
    run("sprites", "make", "-n", "8", "-c", "gem", "-o", "gems.safetensors")
    code, _, err = run("sprites", "evaluate", "classifier.safetensors", "gems.safetensors", "-d", "cpu")
    assert code == 2
    assert "the model knows other classes (sword, heart)" in err
    assert "hotloop sprites train gems.safetensors" in err
    judge = ("--judge", "classifier.safetensors", "-n", "8", "-d", "cpu")
    code, out, _ = run("sprites", "evaluate", "drawer.safetensors", "sprites.safetensors", *judge)
    assert code == 0
    assert "exact copies" in out
    code, out, _ = run(
        "sprites", "generate", "--class", "heart", "--count", "6", "--out", "new.png", "-d", "cpu", "--steps", "2"
    )
    assert code == 0
    assert "6 sprites" in out
    assert picture(tmp_path / "new.png").mode == "RGBA"
    code, _, err = run("sprites", "generate", "--count", "1000000", "-d", "cpu")
    assert code == 2
    assert "a sheet of 2,000,000 sprites at scale 4 is too large" in err, "told before they are drawn"


def test_real_art_is_imported_with_a_summary(run, tmp_path: Path) -> None:
    for name in ("hero", "foe"):
        (tmp_path / "art" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGBA", (16, 16), (40 * i, 80, 200 if name == "hero" else 10, 255)).save(
                tmp_path / "art" / name / f"{i}.png"
            )
    (tmp_path / "art" / "foe" / "broken.png").write_bytes(b"\x89PNG broken")
    code, out, err = run("sprites", "import", "art")
    assert code == 0, err
    assert "kept 6 sprites in 2 classes" in out
    assert "broken.png" in out
    assert SpriteSet.load(tmp_path / "art.safetensors").classes == ("foe", "hero")


MISTAKES = {
    "unknown class": (("sprites", "make", "-c", "sward"), "unknown class 'sward'"),
    "negative count": (("sprites", "make", "-n", "-5"), "cannot make -5 sprites"),
    "one class to sort": (("sprites", "train", "-c", "gem", "-c", "gem"), "nothing to tell it apart from"),
    "missing set": (("sprites", "preview", "none.safetensors"), "there is no file none.safetensors"),
    "foreign set": (("sprites", "preview", "foreign.safetensors"), "cannot be read"),
    "another file": (("sprites", "train", "picture.png"), "cannot be read"),
    "folder without images": (("sprites", "import", "empty"), "it holds no images"),
    "sheet that does not fit": (("sprites", "import", "picture.png", "--tile", "16x16"), "16x16"),
    "bad tile": (("sprites", "import", "picture.png", "--tile", "16"), "--tile '16'"),
    "no drawer": (("sprites", "generate", "--class", "potion"), "there is no file drawer.safetensors"),
    "no folder": (("sprites", "draw", "--out", "none/drawer.safetensors"), "there is no folder none"),
    "unknown device": (("sprites", "draw", "-d", "gpu"), "did you mean 'cuda'"),
    "zero epochs": (("sprites", "draw", "-d", "cpu", "--epochs", "0"), "epochs=0"),
    "zero scale": (("sprites", "preview", "--scale", "0"), "at least 1"),
    "zero to evaluate": (("sprites", "evaluate", "x.safetensors", "-n", "0"), "at least 1"),
    "more than there is memory": (
        ("sprites", "make", "-n", "1" + "0" * 12),
        "1,000,000,000,000 sprites take 240.1 TiB",
    ),
    "to a device": (("sprites", "make", "-o", "/dev/null"), "/dev/null is a device or a pipe"),
    "endless rows": (
        ("sprites", "preview", "--columns", "100000", "--scale", "1000"),
        "1,600,000 sprites at scale 1000",
    ),
    "another format": (("sprites", "preview", "-o", "x.jpg"), "x.jpg is not named like one"),
    "a set as a picture": (("sprites", "make", "-o", "x.png"), "ends in .safetensors for --out"),
    "no import": (("sprites", "import", "none"), "there is no none"),
    "import onto itself": (("sprites", "import", "picture.png", "-o", "picture.png"), "would be overwritten"),
    "endless tile": (("sprites", "import", "picture.png", "--tile", "9" * 5000 + "x16"), "as 16x16"),
    "sheet and data in one": (("sprites", "generate", "-o", "a.png", "--data", "a.png"), "a.png was given twice"),
    "data onto the drawer": (("sprites", "generate", "-m", "a", "--data", "a"), "choose another --data"),
    "profiling a folder": (("profile", "empty"), "there is no file empty"),
    "simulating for ever": (("simulate", "--time-limit", "nan", "picture.png"), "--time-limit nan"),
}


@pytest.mark.parametrize(("args", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_in_a_clear_message_and_leaves_nothing(run, tmp_path: Path, args, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign.safetensors").write_bytes(b"not tensors at all")
    Image.new("RGBA", (37, 20), (1, 2, 3, 255)).save(tmp_path / "picture.png")
    before = sorted(tmp_path.rglob("*"))
    done = run(*args)
    done.assert_told(says)
    assert done.out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("seed", ["-1", "1" + "0" * 30])
@pytest.mark.parametrize(
    "verb", [("sprites", "make"), ("sprites", "generate"), ("sprites", "draw"), ("sprites", "evaluate", "x")]
)
def test_a_seed_that_is_none(run, verb: tuple[str, ...], seed: str) -> None:
    run(*verb, "--seed", seed).assert_told(f"seed {seed} is out of range\n  fix: choose")


def test_long_work_shows_progress_in_a_terminal_and_nothing_in_a_pipe(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawer = TrainedNetwork("drawer", Drawer(Size(2, 2)), ("sword", "heart"), palette_tensor())
    drawer.save(tmp_path / "drawer.safetensors")
    works = {
        "making": ("sprites", "make", "-n", "64"),
        "drawing": ("sprites", "generate", "-n", "4", "--steps", "3", "-d", "cpu"),
    }
    for what, arguments in works.items():
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert "sprites" in out
        with monkeypatch.context() as patch:
            patch.setenv("TTY_COMPATIBLE", "1")
            patch.setenv("TERM", "xterm")
            _, _, err = run(*arguments)
        assert what in err
        assert "100%" in err
