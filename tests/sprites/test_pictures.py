"""Pictures in files: written whole, read whatever they are, and palettes that are the art's own."""

import io
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from hotloop.apps.sprites import pictures
from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.pictures import INK, Flaw, choose_palette, opaque_colours, read_picture, save_png, sheet_of
from hotloop.apps.sprites.pixels import look_up, nearest_colour
from hotloop.errors import BadArgument

from ..thorough import tries


def png(width: int, height: int) -> bytes:
    """A PNG written by hand: its header may say what Pillow would not write."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


def flaw_of(file: Path, limit: int = 1024) -> tuple[str, str]:
    with pytest.raises(Flaw) as caught:
        read_picture(file, limit)
    return caught.value.reason, caught.value.detail


def some(count: int = 5) -> SpriteSet:
    pixels = torch.randint(0, 17, (count, 16, 16), dtype=torch.uint8)
    palette = torch.randint(0, 256, (17, 4), dtype=torch.uint8)
    palette[0], palette[1:, 3] = 0, 255
    return SpriteSet(pixels, torch.zeros(count, dtype=torch.int64), ("a",), palette)


def test_a_png_comes_back_the_same(tmp_path: Path) -> None:
    rgba = torch.randint(0, 256, (5, 7, 4), dtype=torch.uint8)
    save_png(tmp_path / "new" / "picture.png", rgba.transpose(0, 1))
    with Image.open(tmp_path / "new" / "picture.png") as image:
        assert (image.format, image.size) == ("PNG", (5, 7))
    assert torch.equal(read_picture(tmp_path / "new" / "picture.png", 16), rgba.transpose(0, 1))
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_a_sheet_shows_every_sprite_on_its_background() -> None:
    sprites = some(5)
    sheet = sheet_of(sprites, columns=3, scale=2)
    assert sheet.shape == (2 * 36 + 4, 3 * 36 + 4, 4)
    fourth = sheet[40:72:2, 4:36:2]  # first of the second row
    there = sprites.pixels[3] > 0
    assert torch.equal(fourth[there], look_up(sprites.pixels[3:4], sprites.palette)[0][there])
    assert set(map(tuple, fourth[~there].tolist())) <= {INK}
    assert tuple(sheet[-6, -6].tolist()) == INK, "no sixth sprite"
    assert sprites.palette[0].tolist() == [0, 0, 0, 0], "the set is as it was"


def test_sheets_that_cannot_be_meant() -> None:
    with pytest.raises(BadArgument, match="factor=0"):
        sheet_of(some(2), 2, scale=0)
    with pytest.raises(BadArgument, match=r"4 sprites at scale 400 is too large\n  fix: show fewer"):
        sheet_of(some(4), 2, scale=400)
    with pytest.raises(BadArgument, match="0 images"):
        sheet_of(some(0), 2)


def test_every_mode_of_png(tmp_path: Path) -> None:
    grey = Image.fromarray(np.array([[0, 100], [200, 255]], dtype=np.uint8))
    indexed = Image.fromarray(np.array([[0, 1], [2, 2]], dtype=np.uint8))
    indexed.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    levels, opaque = [0, 100, 200, 255], [255] * 4
    cases: list[tuple[Image.Image, dict[str, object], list[int], list[int]]] = [
        (grey.point(lambda level: 255 * (level > 150)).convert("1"), {}, [0, 0, 255, 255], opaque),
        (grey, {}, levels, opaque),
        (grey, {"transparency": 100}, levels, [255, 0, 255, 255]),
        (Image.merge("LA", [grey] * 2), {}, levels, levels),
        (indexed, {"transparency": bytes([255, 0, 130])}, [10, 40, 70, 70], [255, 0, 130, 130]),
        (Image.merge("RGB", [grey] * 3), {"transparency": (200, 200, 200)}, levels, [255, 255, 0, 255]),
    ]
    for image, options, red, alpha in cases:
        image.save(tmp_path / "image.png", **options)
        read = read_picture(tmp_path / "image.png", 16)
        assert (read[..., 0].flatten().tolist(), read[..., 3].flatten().tolist()) == (red, alpha), image.mode
    Image.fromarray(np.full((2, 2), 40_000, np.uint16)).save(tmp_path / "image.png")
    assert flaw_of(tmp_path / "image.png") == ("16-bit grey", "save it with 8 bits")


def sixteen() -> Image.Image:
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 256, (16, 16, 4), dtype=np.uint8))


def as_bytes(image: Image.Image, kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


FOREIGN = ("not a PNG, GIF, BMP or WebP image", "")


@pytest.mark.parametrize(
    ("content", "flaw"),
    [
        (b"", ("empty file", "")),
        (b"# a readme", FOREIGN),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", FOREIGN),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", FOREIGN),
        (png(16, 1025), ("too large", "16x1025, at most 1024x1024 is read")),
        (png(12000, 12000), ("too large", "")),
    ],
)
def test_what_is_not_a_usable_picture(tmp_path: Path, content: bytes, flaw: tuple[str, str]) -> None:
    (tmp_path / "file.png").write_bytes(content)
    assert flaw_of(tmp_path / "file.png") == flaw


def test_what_moves_is_told_apart(tmp_path: Path) -> None:
    first, second = sixteen(), sixteen().transpose(Image.Transpose.ROTATE_90)
    for kind in ("GIF", "PNG", "WEBP"):
        (tmp_path / "still").write_bytes(as_bytes(first, kind))
        (tmp_path / "moving").write_bytes(as_bytes(first, kind, save_all=True, append_images=[second]))
        assert read_picture(tmp_path / "still", 1024).shape == (16, 16, 4)
        assert flaw_of(tmp_path / "moving") == ("animated", "2 frames")


def test_a_file_that_cannot_be_opened_or_is_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flaw_of(tmp_path / "missing.png") == ("cannot be opened", "No such file or directory")
    assert flaw_of(tmp_path) == ("cannot be opened", "Is a directory")
    (tmp_path / "large.png").write_bytes(as_bytes(sixteen(), "PNG"))
    monkeypatch.setattr(pictures, "_FILE_LIMIT", 512)
    assert flaw_of(tmp_path / "large.png")[0] == "too large"


@settings(deadline=None, max_examples=tries(30, 150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["PNG", "GIF", "BMP", "WEBP"]), st.data())
def test_whatever_happened_to_a_file_reading_it_returns(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    content = bytearray(as_bytes(sixteen(), kind))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "file").write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with suppress(Flaw):
        read = read_picture(tmp_path / "file", 64)
        assert (read.dtype, read.dim(), read.shape[2]) == (torch.uint8, 3, 4)


colour_counts = st.dictionaries(st.tuples(*[st.integers(0, 255)] * 3), st.integers(1, 10**9), min_size=1, max_size=60)


@settings(deadline=None, max_examples=tries(20, 60))
@given(colour_counts)
def test_a_palette_is_made_of_the_colours_there_are(counted: dict[tuple[int, int, int], int]) -> None:
    colours, counts = np.array(sorted(counted)), np.array([counted[c] for c in sorted(counted)])
    palette = choose_palette(colours, counts)
    chosen = set(map(tuple, palette[1:, :3].tolist()))
    assert chosen <= set(counted)
    assert torch.equal(choose_palette(colours, counts), palette)
    light = (palette[1:, :3].long() @ torch.tensor([299, 587, 114])).tolist()
    assert light == sorted(light), "from dark to light, and what is left over repeats the last"
    assert palette[1:, 3].tolist() == [255] * 16
    if len(counted) <= 16:
        assert chosen == set(counted)


def test_many_colours_are_reduced_well() -> None:
    """Sixteen clouds of colours far from one another: each gets a colour of its own."""
    torch.manual_seed(0)
    corners = torch.cartesian_prod(torch.tensor([30, 220]), torch.tensor([30, 220]), torch.tensor([20, 90, 160, 230]))
    cloud = corners[torch.randint(0, 16, (4000,))] + torch.randint(-9, 10, (4000, 3))
    rgba = torch.cat([cloud.to(torch.uint8), torch.full((4000, 1), 255, dtype=torch.uint8)], 1).view(1, 40, 100, 4)
    palette = choose_palette(*opaque_colours(rgba))
    shown = look_up(nearest_colour(rgba, palette), palette)
    assert len(set(map(tuple, palette[1:].tolist()))) == 16
    assert (shown.int() - rgba.int()).abs().max() <= 24


@pytest.mark.gpu
def test_a_set_on_a_gpu_is_shown_the_same(tmp_path: Path) -> None:
    here = some(7)
    there = SpriteSet(here.pixels.cuda(), here.labels.cuda(), here.classes, here.palette.cuda())
    assert torch.equal(sheet_of(there, 3).cpu(), sheet_of(here, 3))
    save_png(tmp_path / "sheet.png", sheet_of(there, 3))
    for one, other in zip(opaque_colours(sheet_of(there, 3)), opaque_colours(sheet_of(here, 3)), strict=True):
        assert np.array_equal(one, other)
