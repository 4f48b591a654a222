"""Importing pixel art: crisp, in one palette, and every file that cannot be used is named with the reason."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.importing import ImportResult, Skipped, import_art
from hotloop.apps.sprites.pixels import look_up
from hotloop.errors import BadArgument

COLOURS = np.array(
    [[0, 0, 0, 0], [20, 30, 40, 255], [250, 10, 10, 255], [10, 250, 10, 255], [240, 240, 250, 255]], dtype=np.uint8
)


def art(seed: int, height: int = 16, width: int = 16, colours: np.ndarray = COLOURS) -> np.ndarray:
    """A random RGBA sprite in a few colours, with its corners set."""
    drawn = colours[np.random.default_rng(seed).integers(0, len(colours), (height, width))]
    drawn[0, 0] = drawn[-1, -1] = colours[-1]
    return drawn


def write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "PNG")


def enlarge(pixels: np.ndarray, factor: int) -> np.ndarray:
    return pixels.repeat(factor, 0).repeat(factor, 1)


def shown(sprites: SpriteSet) -> Tensor:
    return look_up(sprites.pixels, sprites.palette)


def reasons(result: ImportResult) -> dict[str, tuple[str, str]]:
    return {each.path: (each.reason, each.detail) for each in result.skipped}


def test_subfolders_are_classes_and_colours_stay(tmp_path: Path) -> None:
    folder = tmp_path / "art"
    for number, name in enumerate(["sword/b", "sword/a", "gem/deep/er/c", "loose"]):
        write(folder / f"{name}.png", art(number))
    result = import_art(folder)
    sprites = result.sprites
    assert sprites.classes == ("art", "gem", "sword")
    assert sprites.labels.tolist() == [0, 1, 2, 2], "loose images, then the folders in order"
    assert torch.equal(shown(sprites), torch.from_numpy(np.stack([art(3), art(2), art(1), art(0)])))
    assert (len(sprites), result.skipped, result.duplicates, result.empty) == (4, (), 0, 0)
    assert result.colours == 4
    assert sprites.source == "imported from art"
    assert result.summary == (
        "kept 4 sprites in 3 classes",
        "classes: art 1, gem 1, sword 2",
        "colours: 4 in the art, all kept",
    )
    sprites.save(tmp_path / "set")
    assert len(SpriteSet.load(tmp_path / "set")) == 4


def test_the_same_folder_gives_the_same_set_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rich = np.random.default_rng(5).integers(0, 256, (200, 4), dtype=np.uint8)
    for number in range(4):
        write(tmp_path / "art" / ("a", "b\x1b[31m")[number % 2] / f"{number}.png", art(number, colours=rich))
    once = import_art(tmp_path / "art")
    monkeypatch.chdir(tmp_path / "art")
    again = import_art(".").sprites
    assert once.colours > 16
    assert "each as the nearest of 16" in once.summary[2]
    assert torch.equal(shown(once.sprites), shown(again))
    assert once.sprites.classes == again.classes == ("a", "b\\x1b[31m"), "names that could steer a terminal"
    assert once.sprites.source == again.source


def test_enlarged_art_is_reduced_and_small_art_is_centred(tmp_path: Path) -> None:
    hidden = enlarge(art(1), 3)
    unseen = hidden[..., 3] == 0
    hidden[unseen] = np.random.default_rng(1).integers(0, 128, (int(unseen.sum()), 4))
    hidden[~unseen, 3] = 128  # colours that cannot be seen make no difference
    for name, pixels in (("a", enlarge(art(0), 64)), ("b", hidden), ("c", art(3, 8, 11)), ("d", art(5, 1, 1))):
        write(tmp_path / f"{name}.png", pixels)
    result = import_art(tmp_path)
    images = shown(result.sprites)
    assert result.colours == 4
    for number in range(2):
        assert torch.equal(images[number], torch.from_numpy(art(number)))
    assert torch.equal(images[2, 4:12, 2:13], torch.from_numpy(art(3, 8, 11)))
    assert images[2].any(-1).sum() == art(3, 8, 11).any(-1).sum(), "nothing around it"
    assert images[3].any(-1).nonzero().tolist() == [[7, 7]]


def test_every_kind_of_failure_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "art"
    write(folder / "good.png", art(0))
    write(folder / "wide.png", art(1, 16, 17))
    write(folder / "blurred.png", enlarge(art(1), 2) + np.eye(32, dtype=np.uint8)[..., None])
    write(folder / "huge.png", np.zeros((1040, 1040, 4), np.uint8))
    write(folder / "clear.png", np.zeros((16, 16, 4), np.uint8))
    frames = [Image.fromarray(art(seed)) for seed in (0, 1, 2)]
    frames[0].save(folder / "walk.gif", save_all=True, append_images=frames[1:])
    frames[0].save(folder / "walk.png", save_all=True, append_images=frames[1:])
    data = (folder / "good.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    (folder / "broken.png").write_bytes(data[:60] + bytes(40) + data[100:])
    (folder / "nothing.png").touch()
    (folder / "notes\x1b[2J.txt").write_text("read me")
    (folder / ".hidden.png").write_bytes(data)
    (folder / ".git").mkdir()
    (folder / ".git" / "in.png").write_bytes(data)
    calls: list[tuple[int, int]] = []
    result = import_art(folder, progress=lambda done, total: calls.append((done, total)))
    assert (len(result.sprites), result.sprites.classes) == (1, ("art",))
    found = reasons(result)
    assert {path: reason for path, (reason, _) in found.items()} == {
        "wide.png": "wrong size",
        "blurred.png": "wrong size",
        "huge.png": "too large",
        "clear.png": "fully transparent",
        "walk.gif": "animated",
        "walk.png": "animated",
        "cut.png": "damaged",
        "broken.png": "damaged",
        "nothing.png": "empty file",
        "notes\\x1b[2J.txt": "not a PNG, GIF, BMP or WebP image",
    }
    assert found["wide.png"][1] == "17x16"
    assert found["blurred.png"][1] == "32x32, not a clean enlargement"
    assert found["walk.gif"][1] == "3 frames"
    assert calls == [(done, 11) for done in range(1, 12)]
    lines = result.summary[3:]
    assert lines[0] == "skipped 2, wrong size: blurred.png (32x32, not a clean enlargement), wide.png (17x16)"
    assert len(lines) == 7
    assert not any("\x1b" in line for line in lines)


def test_duplicates_within_a_class_are_dropped(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1.png", art(0))
    write(tmp_path / "a" / "2.png", art(1))
    write(tmp_path / "a" / "3.png", enlarge(art(0), 2))
    write(tmp_path / "b" / "1.png", art(0))
    result = import_art(tmp_path)
    assert (len(result.sprites), result.duplicates) == (3, 1)
    assert torch.equal(shown(result.sprites), torch.from_numpy(np.stack([art(0), art(1), art(0)])))
    assert result.sprites.labels.tolist() == [0, 0, 1]
    assert "dropped 1 duplicate" in result.summary


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links here")
def test_folders_behind_links_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "art"
    write(tmp_path / "1.png", art(0))
    write(folder / "own" / "2.png", art(1))
    (folder / "own" / "round").symlink_to(folder)
    (folder / "own" / "gone.png").symlink_to(folder / "gone.png")
    (folder / "everything").symlink_to("/")
    (folder / "own" / "4.png").symlink_to(tmp_path / "1.png")
    (tmp_path / "link to art").symlink_to(folder)
    for given in (folder, tmp_path / "link to art"):
        result = import_art(given)
        assert (result.sprites.classes, len(result.sprites), result.skipped) == (("own",), 2, ())


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="whoever runs this may read everything")
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.png", art(0))
    write(tmp_path / "b.png", art(0))
    (tmp_path / "b.png").chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    found = reasons(import_art(tmp_path))
    assert found == {
        "b.png": ("cannot be opened", "Permission denied"),
        "closed": ("cannot be opened", "Permission denied"),
    }


def test_nothing_to_use(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"nothing in .* can be used: it holds no images\n  fix: sprites are 16x16"):
        import_art(tmp_path)
    for number in range(5):
        (tmp_path / f"{number}.png").touch()
    write(tmp_path / "wide.png", art(0, 20, 20))
    with pytest.raises(BadArgument) as caught:
        import_art(tmp_path)
    assert "can be used: 6 files\n  skipped 5, empty file: 0.png, 1.png, 2.png, 3.png and 1 more\n" in str(caught.value)
    assert "skipped 1, wrong size: wide.png (20x20)" in str(caught.value)
    with pytest.raises(BadArgument, match="spacing=1 without a tile size"):
        import_art(tmp_path, spacing=1)
    with pytest.raises(BadArgument, match=r"there is no .*missing\n  fix: give a folder"):
        import_art(tmp_path / "missing")


def sheet_of(tiles: list[np.ndarray], columns: int, margin: int = 0, spacing: int = 0) -> np.ndarray:
    height, width = tiles[0].shape[:2]
    rows = -(-len(tiles) // columns)
    shape = (
        2 * margin + rows * (height + spacing) - spacing,
        2 * margin + columns * (width + spacing) - spacing,
        4,
    )
    sheet = np.full(shape, 77, np.uint8)  # what is between is not looked at
    for number in range(rows * columns):
        top = margin + number // columns * (height + spacing)
        left = margin + number % columns * (width + spacing)
        sheet[top : top + height, left : left + width] = tiles[number] if number < len(tiles) else 0
    return sheet


@pytest.mark.parametrize(("margin", "spacing"), [(0, 0), (2, 5)])
def test_a_sheet_is_cut_into_its_tiles(tmp_path: Path, margin: int, spacing: int) -> None:
    tiles = [art(seed) for seed in range(7)]
    write(tmp_path / "dungeon.png", sheet_of(tiles, 4, margin, spacing))
    result = import_art(tmp_path / "dungeon.png", margin=margin, spacing=spacing)
    assert torch.equal(shown(result.sprites), torch.from_numpy(np.stack(tiles)))
    assert (result.sprites.classes, len(result.sprites), result.empty, result.skipped) == (("dungeon",), 7, 1, ())
    assert "passed over 1 empty tile" in result.summary


def test_tiles_of_other_sizes(tmp_path: Path) -> None:
    write(tmp_path / "small.png", sheet_of([art(0, 8, 12), art(1, 8, 12)], 1))
    small = import_art(tmp_path / "small.png", tile=(12, 8))
    assert torch.equal(shown(small.sprites)[1, 4:12, 2:14], torch.from_numpy(art(1, 8, 12)))
    write(tmp_path / "large.png", sheet_of([enlarge(art(0), 2), art(1, 32, 32), enlarge(art(2), 2)], 3, spacing=2))
    large = import_art(tmp_path / "large.png", tile=32, spacing=2)
    assert torch.equal(shown(large.sprites), torch.from_numpy(np.stack([art(0), art(2)])))
    assert large.skipped == (Skipped("large.png tile 2", "wrong size", "32x32, not a clean enlargement"),)


def test_a_folder_of_sheets(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1.png", sheet_of([art(0), art(1)], 2))
    write(tmp_path / "a" / "2.png", sheet_of([art(1), art(2)], 1))
    write(tmp_path / "b" / "3.png", art(3, 16, 33))
    write(tmp_path / "b" / "4.png", sheet_of([art(seed) for seed in range(100)], 100))  # wider than one image may be
    result = import_art(tmp_path, tile=(16, 16))
    assert (len(result.sprites), result.duplicates) == (103, 1)
    assert reasons(result)["b/3.png"] == ("wrong size", "33x16, not whole tiles of 16x16 with this margin and spacing")


UNEVEN = sheet_of([art(seed) for seed in range(6)], 3, spacing=1)


@pytest.mark.parametrize(
    ("sheet", "options", "message"),
    [
        (art(0), {"tile": 0}, "tiles of 0x0"),
        (art(0), {"tile": (16, -1)}, "tiles of 16x-1"),
        (art(0), {"margin": -1}, "margin=-1"),
        (art(0), {"spacing": -1}, "spacing=-1"),
        (art(0), {"tile": 24}, "tiles of 24x24 cannot become 16x16"),
        (art(0), {"tile": (32, 16)}, "cannot become 16x16"),
        (UNEVEN, {}, "50x33, not whole tiles of 16x16"),
        (np.zeros((16, 4112, 4), np.uint8), {}, r"too large: a.png \(4112x16, at most 4096x4096 is read"),
        (np.zeros((32, 32, 4), np.uint8), {}, "can be used: 1 file, 4 empty tiles"),
    ],
    ids=range(9),
)
def test_sheets_and_grids_that_cannot_be_used(
    tmp_path: Path, sheet: np.ndarray, options: dict[str, int], message: str
) -> None:
    write(tmp_path / "a.png", sheet)
    with pytest.raises(BadArgument, match=message):
        import_art(tmp_path / "a.png", **options)
