"""`SpriteSet`: in memory, in a file, and in a file that something happened to."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.errors import BadArgument

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
    pixels, labels = next(iter(DataLoader(sprites.dataset(), batch_size=4)))
    assert (pixels.shape, labels.tolist()) == ((4, 16, 16), [0, 1, 2, 0])


def test_some_classes_become_all_there_are_and_an_unknown_one_lists_them() -> None:
    sprites = some()
    part = sprites.only(["shield", "gem", "shield"])
    assert part.classes == ("shield", "gem")
    assert part.labels.tolist() == [1, 0, 1, 0]
    assert torch.equal(part.pixels, sprites.pixels[[0, 2, 3, 5]])
    with pytest.raises(BadArgument, match=r"unknown class 'swo\\x1brd'\n  fix: choose one of: gem, épée, shield"):
        sprites.only(["gem", "swo\x1brd"])


@pytest.mark.parametrize("sprites", [some(0), some(1), some(6), some()[::2]])
def test_saved_and_loaded_it_is_the_same(tmp_path: Path, sprites: SpriteSet) -> None:
    file = tmp_path / "new folder" / "set.safetensors"
    sprites.save(file)
    assert equal(SpriteSet.load(str(file)), sprites)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no file .*\n  fix: make one with `hotloop sprites make`"),
        (b"", r"cannot be read: .*\n  fix: it may be cut short"),
        (b"\x89PNG\r\n\x1a\n and so on", "cannot be read"),
    ],
)
def test_what_is_not_such_a_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "set.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadArgument, match=message):
        SpriteSet.load(file)


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


ABOUT = {"format": "hotloop-sprites", "version": 1, "classes": ["a", "b", "c"]}
DAMAGED = r"is damaged: its tensors do not fit together\n  fix: make it again"


@pytest.mark.parametrize(
    ("about", "changes", "message"),
    [
        ({}, {}, "holds tensors without a format of hotloop, not hotloop-sprites"),
        ([1, 2], {}, "holds tensors without a format of hotloop"),
        ("[" * 100_000, {}, "cannot be read"),
        ({**ABOUT, "format": "\x1b[2J"}, {}, r"holds \\x1b\[2J, not hotloop-sprites"),
        ({**ABOUT, "version": 2}, {}, r"written by a newer hotloop\n  fix: pip install --upgrade hotloop"),
        ({**ABOUT, "version": "2.0"}, {}, "written by a newer hotloop"),
        *(({**ABOUT, "classes": classes}, {}, DAMAGED) for classes in (None, "abc", [1, 2, 3], ["a", "b"])),
        *((ABOUT, {name: None}, DAMAGED) for name in ("pixels", "labels", "palette")),
        *(
            (ABOUT, {name: wrong}, DAMAGED)
            for name, wrong in (
                ("pixels", torch.zeros(6, 16, 15, dtype=torch.uint8)),
                ("pixels", torch.zeros(5, 16, 16, dtype=torch.uint8)),
                ("pixels", torch.zeros((), dtype=torch.uint8)),
                ("pixels", torch.zeros(6, 16, 16)),
                ("pixels", torch.full((6, 16, 16), 17, dtype=torch.uint8)),
                ("labels", torch.zeros(6)),
                ("labels", torch.zeros(6, 1, dtype=torch.int64)),
                ("labels", torch.full((6,), 3)),
                ("labels", torch.full((6,), -1)),
                ("palette", torch.zeros(16, 4, dtype=torch.uint8)),
                ("palette", torch.zeros(17, 4)),
            )
        ),
    ],
    ids=range(24),
)
def test_a_file_that_says_or_holds_something_else(
    tmp_path: Path, about: Any, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    sprites = some()
    tensors = {"pixels": sprites.pixels, "labels": sprites.labels, "palette": sprites.palette, **changes}
    text = about if isinstance(about, str) else json.dumps(about)
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "set", metadata={"hotloop": text})
    with pytest.raises(BadArgument, match=message):
        SpriteSet.load(tmp_path / "set")


@pytest.mark.gpu
def test_a_set_on_a_gpu_is_saved_all_the_same(tmp_path: Path) -> None:
    here = some()
    SpriteSet(here.pixels.cuda(), here.labels.cuda(), here.classes, here.palette.cuda(), here.source).save(
        tmp_path / "set"
    )
    assert equal(SpriteSet.load(tmp_path / "set"), here)
