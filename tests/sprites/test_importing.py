"""Importing pixel art: crisp, in one palette, and every file that cannot be used is named with the reason."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.importing import ImportResult, Skipped, import_folder, import_sheet
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
    result = import_folder(folder)
    sprites = result.sprites
    assert sprites.classes == ("art", "gem", "sword")
    assert sprites.labels.tolist() == [0, 1, 2, 2], "loose images, then the folders in order"
    assert torch.equal(shown(sprites), torch.from_numpy(np.stack([art(3), art(2), art(1), art(0)])))
    assert (result.kept, result.skipped, result.duplicates, result.empty) == (4, (), 0, 0)
    assert (result.colours, result.exact) == (4, True)
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
    for number in range(6):
        write(tmp_path / "art" / "ab"[number % 2] / f"{number}.png", art(number, colours=rich))
    once = import_folder(tmp_path / "art")
    monkeypatch.chdir(tmp_path / "art")
    again = import_folder(".")
    assert not once.exact
    assert torch.equal(once.sprites.pixels, again.sprites.pixels)
    assert torch.equal(once.sprites.palette, again.sprites.palette)
    assert (once.sprites.classes, once.sprites.source) == (again.sprites.classes, again.sprites.source)
    assert "each as the nearest of 16" in once.summary[2]


def test_enlarged_art_is_reduced_and_small_art_is_centred(tmp_path: Path) -> None:
    write(tmp_path / "a.png", enlarge(art(0), 2))
    write(tmp_path / "b.png", enlarge(art(1), 3))
    write(tmp_path / "c.png", enlarge(art(2), 64))
    write(tmp_path / "d.png", art(3, 8, 11))
    write(tmp_path / "e.png", art(4, 12, 16))
    write(tmp_path / "f.png", art(5, 1, 1))
    images = shown(import_folder(tmp_path).sprites)
    for number in range(3):
        assert torch.equal(images[number], torch.from_numpy(art(number)))
    assert torch.equal(images[3, 4:12, 2:13], torch.from_numpy(art(3, 8, 11)))
    assert images[3].any(-1).sum() == art(3, 8, 11).any(-1).sum(), "nothing around it"
    assert torch.equal(images[4, 2:14], torch.from_numpy(art(4, 12, 16)))
    assert images[5].any(-1).nonzero().tolist() == [[7, 7]]


def test_colours_that_cannot_be_seen_make_no_difference(tmp_path: Path) -> None:
    drawn = enlarge(art(0), 2)
    hidden = drawn[..., 3] == 0
    drawn[hidden] = np.random.default_rng(1).integers(0, 128, (int(hidden.sum()), 4))
    drawn[~hidden, 3] = 128
    write(tmp_path / "a.png", drawn)
    result = import_folder(tmp_path)
    assert result.colours == 4
    assert torch.equal(shown(result.sprites)[0], torch.from_numpy(art(0)))


def test_every_kind_of_failure_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "art"
    write(folder / "good.png", art(0))
    write(folder / "wide.png", art(1, 16, 17))
    write(folder / "odd.png", art(1, 24, 24))
    write(folder / "twice wide.png", art(1, 16, 32))
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
    result = import_folder(folder, progress=lambda done, total: calls.append((done, total)))
    assert (result.kept, result.sprites.classes) == (1, ("art",))
    found = reasons(result)
    assert {path: reason for path, (reason, _) in found.items()} == {
        "wide.png": "wrong size",
        "odd.png": "wrong size",
        "twice wide.png": "wrong size",
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
    assert calls == [(done, 13) for done in range(1, 14)]
    lines = result.summary[3:]
    assert lines[0] == (
        "skipped 4, wrong size: blurred.png (32x32, not a clean enlargement), odd.png (24x24), twice wide.png (32x16), "
        "wide.png (17x16)"
    )
    assert len(lines) == 7
    assert not any("\x1b" in line for line in lines)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    write(tmp_path / "good.png", art(0))
    for number in range(9):
        (tmp_path / f"{number}.png").touch()
    assert import_folder(tmp_path).summary[-1] == "skipped 9, empty file: 0.png, 1.png, 2.png, 3.png and 5 more"


def test_duplicates_within_a_class_are_dropped(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1.png", art(0))
    write(tmp_path / "a" / "2.png", art(1))
    write(tmp_path / "a" / "3.png", enlarge(art(0), 2))
    write(tmp_path / "b" / "1.png", art(0))
    result = import_folder(tmp_path)
    assert (result.kept, result.duplicates) == (3, 1)
    assert torch.equal(shown(result.sprites), torch.from_numpy(np.stack([art(0), art(1), art(0)])))
    assert result.sprites.labels.tolist() == [0, 0, 1]
    assert "dropped 1 duplicate" in result.summary


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links here")
def test_links_are_followed_once_and_not_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "art"
    write(tmp_path / "elsewhere" / "1.png", art(0))
    write(folder / "own" / "2.png", art(1))
    write(folder / ".kept" / "3.png", art(2))
    (folder / "inside").symlink_to(folder / ".kept")
    (folder / "own" / "round").symlink_to(folder)
    (folder / "own" / "self.png").symlink_to(folder / "own" / "self.png")
    (folder / "own" / "gone.png").symlink_to(folder / "gone.png")
    (folder / "everything").symlink_to("/")
    (folder / "linked").symlink_to(Path("..", "elsewhere"))
    (folder / "own" / "4.png").symlink_to(tmp_path / "elsewhere" / "1.png")
    (tmp_path / "link to art").symlink_to(folder)
    for given in (folder, tmp_path / "link to art"):
        result = import_folder(given)
        assert result.sprites.classes == ("inside", "own")
        assert result.kept == 2
        assert reasons(result) == {
            "everything": ("links out of the folder", "/"),
            "linked": ("links out of the folder", str(tmp_path / "elsewhere")),
            "own/4.png": ("links out of the folder", str(tmp_path / "elsewhere" / "1.png")),
        }
    assert any("everything (/)" in line for line in result.summary)


def test_there_is_an_end_to_what_is_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.apps.sprites.importing.FILE_LIMIT", 3)
    for number in range(4):
        write(tmp_path / f"{number}.png", art(number))
    with pytest.raises(BadArgument, match="more than 3 files"):
        import_folder(tmp_path)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="whoever runs this may read everything")
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.png", art(0))
    write(tmp_path / "b.png", art(0))
    (tmp_path / "b.png").chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    found = reasons(import_folder(tmp_path))
    assert found == {
        "b.png": ("cannot be opened", "Permission denied"),
        "closed": ("cannot be opened", "Permission denied"),
    }


@pytest.mark.skipif(not Path("/proc/1").is_dir(), reason="no /proc here")
def test_a_link_that_may_not_be_followed_does_not_end_the_import(tmp_path: Path) -> None:
    write(tmp_path / "a.png", art(0))
    (tmp_path / "there").symlink_to("/proc/1/cwd")
    result = import_folder(tmp_path)
    assert result.kept == 1
    assert reasons(result)["there"][0] in ("cannot be opened", "links out of the folder")


def test_folders_with_nothing_to_use(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"nothing in .* can be used: it holds no images\n  fix: sprites are 16x16"):
        import_folder(tmp_path)
    (tmp_path / "a.png").touch()
    write(tmp_path / "b.png", art(0, 20, 20))
    with pytest.raises(BadArgument) as caught:
        import_folder(tmp_path)
    assert "can be used: 2 files\n  skipped 1, empty file: a.png\n  skipped 1, wrong size: b.png (20x20)" in str(
        caught.value
    )
    with pytest.raises(BadArgument, match="spacing=1 without a tile size"):
        import_folder(tmp_path, spacing=1)
    with pytest.raises(BadArgument, match=r"is not a folder\n  fix: give a folder"):
        import_folder(tmp_path / "missing")
    with pytest.raises(BadArgument, match=r"is not a folder\n  fix: for one sprite sheet use import_sheet"):
        import_folder(tmp_path / "b.png")


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


@pytest.mark.parametrize(("margin", "spacing"), [(0, 0), (3, 0), (0, 1), (2, 5)])
def test_a_sheet_is_cut_into_its_tiles(tmp_path: Path, margin: int, spacing: int) -> None:
    tiles = [art(seed) for seed in range(7)]
    write(tmp_path / "dungeon.png", sheet_of(tiles, 4, margin, spacing))
    result = import_sheet(tmp_path / "dungeon.png", margin=margin, spacing=spacing)
    assert torch.equal(shown(result.sprites), torch.from_numpy(np.stack(tiles)))
    assert result.sprites.classes == ("dungeon",)
    assert (result.kept, result.empty, result.skipped) == (7, 1, ())
    assert "passed over 1 empty tile" in result.summary


def test_tiles_of_other_sizes(tmp_path: Path) -> None:
    write(tmp_path / "small.png", sheet_of([art(0, 8, 12), art(1, 8, 12)], 1))
    small = import_sheet(tmp_path / "small.png", tile=(12, 8))
    assert torch.equal(shown(small.sprites)[1, 4:12, 2:14], torch.from_numpy(art(1, 8, 12)))
    write(tmp_path / "large.png", sheet_of([enlarge(art(0), 2), art(1, 32, 32), enlarge(art(2), 2)], 3, spacing=2))
    large = import_sheet(tmp_path / "large.png", tile=32, spacing=2)
    assert torch.equal(shown(large.sprites), torch.from_numpy(np.stack([art(0), art(2)])))
    assert large.skipped == (Skipped("large.png tile 2", "wrong size", "32x32, not a clean enlargement"),)


def test_a_folder_of_sheets(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1.png", sheet_of([art(0), art(1)], 2))
    write(tmp_path / "a" / "2.png", sheet_of([art(1), art(2)], 1))
    write(tmp_path / "b" / "3.png", art(3, 16, 33))
    write(tmp_path / "b" / "4.png", sheet_of([art(seed) for seed in range(100)], 100))  # wider than one image may be
    result = import_folder(tmp_path, tile=(16, 16))
    assert (result.kept, result.duplicates) == (103, 1)
    assert result.skipped == (Skipped("b/3.png", "wrong size", "33x16; what fits: margin=0, spacing=1"),)


def test_a_sheet_that_does_not_come_out_even(tmp_path: Path) -> None:
    write(tmp_path / "sheet.png", sheet_of([art(seed) for seed in range(6)], 3, margin=0, spacing=1))
    with pytest.raises(BadArgument) as caught:
        import_sheet(tmp_path / "sheet.png")
    assert "sheet.png: 50x33 is not a whole number of 16x16 tiles with margin=0, spacing=0" in caught.value.what
    assert caught.value.fix is not None
    assert caught.value.fix.startswith("what fits: margin=0, spacing=1")
    write(tmp_path / "prime.png", art(0, 101, 17))
    with pytest.raises(BadArgument, match="no margin and spacing fit; check the tile size"):
        import_sheet(tmp_path / "prime.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 0}, "tiles of 0x0"),
        ({"tile": (16, -1)}, "tiles of 16x-1"),
        ({"margin": -1}, "margin=-1"),
        ({"spacing": -1}, "spacing=-1"),
        ({"tile": 24}, "tiles of 24x24 cannot become 16x16"),
        ({"tile": (32, 16)}, "cannot become 16x16"),
        ({"tile": 2048}, "cannot become 16x16"),
    ],
)
def test_grids_that_cannot_be_meant(tmp_path: Path, options: dict[str, int], message: str) -> None:
    write(tmp_path / "sheet.png", art(0))
    with pytest.raises(BadArgument, match=message):
        import_sheet(tmp_path / "sheet.png", **options)


def test_sheets_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="there is no file"):
        import_sheet(tmp_path / "missing.png")
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(BadArgument, match=r"text\.png: not a PNG, GIF, BMP or WebP image"):
        import_sheet(tmp_path / "text.png")
    write(tmp_path / "long.png", np.zeros((16, 4112, 4), np.uint8))
    with pytest.raises(BadArgument, match=r"too large \(4112x16, at most 4096x4096 is read\)"):
        import_sheet(tmp_path / "long.png")
    write(tmp_path / "clear.png", np.zeros((32, 32, 4), np.uint8))
    with pytest.raises(BadArgument, match="can be used: 1 file, 4 empty tiles"):
        import_sheet(tmp_path / "clear.png")


def test_names_that_could_steer_a_terminal(tmp_path: Path) -> None:
    write(tmp_path / "a\x1b[31mb" / "1.png", art(0))
    assert import_folder(tmp_path).sprites.classes == ("a\\x1b[31mb",)
