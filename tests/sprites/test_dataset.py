"""`SpriteSet`: in memory, in a file, and in a file that something happened to."""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from hotloop.apps.sprites.dataset import SpriteSet, format_of
from hotloop.errors import BadArgument, OutputError
from hotloop.files.whole import write_whole

from ..thorough import tries


def some(count: int = 6) -> SpriteSet:
    generator = torch.Generator().manual_seed(0)
    return SpriteSet(
        pixels=torch.randint(0, 17, (count, 16, 16), generator=generator, dtype=torch.uint8),
        labels=torch.arange(count) % 3,
        classes=("gem", "épée", "shield"),
        palette=torch.randint(0, 256, (17, 4), generator=generator, dtype=torch.uint8),
        source="a test",
    )


def inside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def equal(one: SpriteSet, other: SpriteSet) -> bool:
    tensors = all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("pixels", "labels", "palette"))
    return tensors and (one.classes, one.source) == (other.classes, other.source)


def test_a_part_is_a_set_too() -> None:
    sprites = some()
    assert len(sprites) == 6
    assert equal(sprites[:], sprites)
    assert sprites[2:4].labels.tolist() == [2, 0]
    assert sprites[torch.tensor([5, 0])].labels.tolist() == [2, 0]
    assert sprites[sprites.labels == 1].labels.tolist() == [1, 1]
    assert torch.equal(sprites.of("épée").pixels, sprites.pixels[[1, 4]])
    assert sprites.label("shield") == 2
    pixels, labels = next(iter(DataLoader(sprites.dataset(), batch_size=4)))
    assert (pixels.shape, labels.tolist()) == ((4, 16, 16), [0, 1, 2, 0])


def test_some_classes_become_all_there_are() -> None:
    sprites = some()
    part = sprites.only(["shield", "gem", "shield"])
    assert part.classes == ("shield", "gem")
    assert part.labels.tolist() == [1, 0, 1, 0]
    assert torch.equal(part.pixels, sprites.pixels[[0, 2, 3, 5]])
    with pytest.raises(BadArgument, match="unknown class 'sword'"):
        sprites.only(["gem", "sword"])


def test_an_unknown_class_lists_those_there_are() -> None:
    with pytest.raises(BadArgument, match=r"unknown class 'swo\\x1brd'\n  fix: choose one of: gem, épée, shield"):
        some().of("swo\x1brd")


@pytest.mark.parametrize("count", [0, 1, 6])
def test_saved_and_loaded_it_is_the_same(tmp_path: Path, count: int) -> None:
    file = tmp_path / "new folder" / "set.safetensors"
    some(count).save(file)
    assert equal(SpriteSet.load(file), some(count))
    assert equal(SpriteSet.load(str(file)), some(count))
    assert inside(file.parent) == ["set.safetensors"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()


def test_a_part_of_a_set_can_be_saved(tmp_path: Path) -> None:
    some()[::2].save(tmp_path / "set")
    assert equal(SpriteSet.load(tmp_path / "set"), some()[::2])


def test_the_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "set.safetensors"
    some(3).save(file)

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OutputError, match=r"set\.safetensors: No space left on device\n  fix: choose a writable"):
        some(6).save(file)
    assert inside(tmp_path) == ["set.safetensors"]
    assert len(SpriteSet.load(file)) == 3


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        some().save(tmp_path / "set.safetensors")
    assert inside(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "file" / "set", tmp_path / "folder"):
        with pytest.raises(OutputError, match="cannot write"):
            write_whole(place, b"data")
    assert inside(tmp_path) == ["file", "folder"]
    assert inside(tmp_path / "folder") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no file .*\n  fix: make one with `hotloop sprites make`"),
        (b"", r"cannot be read: .*\n  fix: it may be cut short"),
        (b"\x89PNG\r\n\x1a\n and so on", "cannot be read"),
        (b"\xff" * 100, "cannot be read"),
    ],
)
def test_what_is_not_such_a_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "set.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadArgument, match=message):
        SpriteSet.load(file)
    with pytest.raises(BadArgument, match="there is no file"):
        SpriteSet.load(tmp_path)


def test_words_without_end_about_a_set(tmp_path: Path) -> None:
    save_file({"pixels": torch.zeros(1)}, tmp_path / "set", metadata={"hotloop": "[" * 100_000})
    with pytest.raises(BadArgument, match="cannot be read"):
        SpriteSet.load(tmp_path / "set")


@settings(deadline=None, max_examples=tries(20, 60))
@given(st.data())
def test_however_it_is_cut_or_damaged_it_loads_or_is_explained(tmp_path_factory: Any, data: st.DataObject) -> None:
    file = tmp_path_factory.mktemp("damage") / "set"
    some(2).save(file)
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with suppress(BadArgument):  # and nothing else
        assert len(SpriteSet.load(file)) == 2


def write(file: Path, about: Any, **changes: torch.Tensor | None) -> None:
    sprites = some()
    tensors = {"pixels": sprites.pixels, "labels": sprites.labels, "palette": sprites.palette, **changes}
    text = about if isinstance(about, str) else json.dumps(about)
    save_file({k: v for k, v in tensors.items() if v is not None}, file, metadata={"hotloop": text})


ABOUT = {"format": "hotloop-sprites", "version": 1, "classes": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({}, "holds tensors without a format of hotloop, not hotloop-sprites"),
        ([1, 2], "holds tensors without a format of hotloop"),
        ("{", "cannot be read"),
        ({**ABOUT, "format": "hotloop-drawer"}, "holds hotloop-drawer, not hotloop-sprites"),
        ({**ABOUT, "format": "\x1b[2J"}, r"holds \\x1b\[2J"),
        ({**ABOUT, "version": 2}, r"written by a newer hotloop\n  fix: pip install --upgrade hotloop"),
        ({**ABOUT, "version": "2.0"}, "written by a newer hotloop"),
        ({**ABOUT, "classes": None}, "is damaged"),
        ({**ABOUT, "classes": "abc"}, "is damaged"),
        ({**ABOUT, "classes": [1, 2, 3]}, "is damaged"),
        ({**ABOUT, "classes": ["a", "b"]}, "is damaged"),
    ],
)
def test_metadata_that_says_something_else(tmp_path: Path, about: Any, message: str) -> None:
    write(tmp_path / "set", about)
    with pytest.raises(BadArgument, match=message):
        SpriteSet.load(tmp_path / "set")


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    some().save(tmp_path / "set")
    assert format_of(tmp_path / "set", "make one") == "hotloop-sprites"
    with pytest.raises(BadArgument, match=r"there is no file .*\n  fix: make one"):
        format_of(tmp_path / "missing", "make one")


def test_a_safetensors_file_of_someone_else(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert format_of(tmp_path / "model.safetensors", "") == "tensors without a format of hotloop"
    with pytest.raises(BadArgument, match="holds tensors without a format of hotloop"):
        SpriteSet.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {"pixels": None},
        {"labels": None},
        {"palette": None},
        {"pixels": torch.zeros(6, 16, 15, dtype=torch.uint8)},
        {"pixels": torch.zeros(5, 16, 16, dtype=torch.uint8)},
        {"pixels": torch.zeros((), dtype=torch.uint8)},
        {"pixels": torch.zeros(6, 16, 16)},
        {"pixels": torch.full((6, 16, 16), 17, dtype=torch.uint8)},
        {"labels": torch.zeros(6)},
        {"labels": torch.zeros(6, 1, dtype=torch.int64)},
        {"labels": torch.zeros((), dtype=torch.int64)},
        {"labels": torch.full((6,), 3)},
        {"labels": torch.full((6,), -1)},
        {"palette": torch.zeros(16, 4, dtype=torch.uint8)},
        {"palette": torch.zeros(17, 4)},
    ],
    ids=lambda changes: ", ".join(
        f"{k} {v if v is None else f'{v.dtype} {tuple(v.shape)}'}" for k, v in changes.items()
    ),
)
def test_tensors_that_do_not_fit_together(tmp_path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    write(tmp_path / "set", ABOUT)
    assert len(SpriteSet.load(tmp_path / "set")) == 6
    write(tmp_path / "set", ABOUT, **changes)
    with pytest.raises(BadArgument, match=r"is damaged: its tensors do not fit together\n  fix: make it again"):
        SpriteSet.load(tmp_path / "set")


@pytest.mark.gpu
def test_a_set_on_a_gpu_is_saved_all_the_same(tmp_path: Path) -> None:
    here = some()
    SpriteSet(here.pixels.cuda(), here.labels.cuda(), here.classes, here.palette.cuda(), here.source).save(
        tmp_path / "set"
    )
    assert equal(SpriteSet.load(tmp_path / "set"), here)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
