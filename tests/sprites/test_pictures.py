"""Pictures in files: written whole, read whatever they are, and palettes that are the art's own."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from hotloop.apps.sprites import pictures
from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.pictures import INK, Flaw, choose_palette, opaque_colours, read_picture, save_png, sheet_of
from hotloop.apps.sprites.pixels import look_up, nearest_colour
from hotloop.errors import BadArgument, OutputError

from ..thorough import tries


def png(
    width: int, height: int, *, depth: int = 8, kind: int = 6, data: bytes | None = None, extra: bytes = b""
) -> bytes:
    """A PNG written by hand, for what Pillow will not write."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    body = zlib.compress(data if data is not None else b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", body) + chunk(b"IEND", b"")


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
    read = read_picture(tmp_path / "new" / "picture.png", 16)
    assert isinstance(read, Tensor)
    assert torch.equal(read, rgba.transpose(0, 1))
    assert len(list((tmp_path / "new").iterdir())) == 1


@pytest.mark.parametrize("bad", [torch.zeros(2, 2, 4), torch.zeros(2, 2, 3).byte(), torch.zeros(0, 2, 4).byte()])
def test_a_picture_that_is_none(tmp_path: Path, bad: Tensor) -> None:
    with pytest.raises(BadArgument, match=r"give uint8 \(h, w, 4\)"):
        save_png(tmp_path / "picture.png", bad)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        save_png(tmp_path / "file" / "picture.png", torch.zeros(2, 2, 4).byte())


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
    grey = np.array([[0, 100], [200, 255]], dtype=np.uint8)
    indexed = Image.fromarray(np.array([[0, 1], [2, 2]], dtype=np.uint8))
    indexed.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    images = {
        "1": (Image.fromarray(grey > 150), {}),
        "L": (Image.fromarray(grey), {}),
        "L-key": (Image.fromarray(grey), {"transparency": 100}),
        "LA": (Image.merge("LA", [Image.fromarray(grey)] * 2), {}),
        "P": (indexed, {}),
        "P-trns": (indexed, {"transparency": bytes([255, 0, 130])}),
        "RGB": (Image.merge("RGB", [Image.fromarray(grey)] * 3), {}),
        "RGB-key": (Image.merge("RGB", [Image.fromarray(grey)] * 3), {"transparency": (200, 200, 200)}),
        "I16": (Image.fromarray(grey.astype(np.uint16) * 257), {}),
    }
    expected = {
        "1": ([0, 0, 255, 255], [255] * 4),
        "L": ([0, 100, 200, 255], [255] * 4),
        "L-key": ([0, 100, 200, 255], [255, 0, 255, 255]),
        "LA": ([0, 100, 200, 255], [0, 100, 200, 255]),
        "P": ([10, 40, 70, 70], [255] * 4),
        "P-trns": ([10, 40, 70, 70], [255, 0, 130, 130]),
        "RGB": ([0, 100, 200, 255], [255] * 4),
        "RGB-key": ([0, 100, 200, 255], [255, 255, 0, 255]),
        "I16": ([0, 100, 200, 255], [255] * 4),
    }
    for name, (image, options) in images.items():
        image.save(tmp_path / "image.png", **options)
        read = read_picture(tmp_path / "image.png", 16)
        assert isinstance(read, Tensor), name
        red, alpha = expected[name]
        assert read[..., 0].flatten().tolist() == red, name
        assert read[..., 3].flatten().tolist() == alpha, name


def test_16_bits_a_channel(tmp_path: Path) -> None:
    file = tmp_path / "deep.png"
    key = struct.pack(">I", 2) + b"tRNS" + struct.pack(">H", 0xABCD) + struct.pack(">I", zlib.crc32(b"tRNS\xab\xcd"))
    file.write_bytes(png(2, 1, depth=16, kind=0, data=b"\0\xab\xcd\x12\x34", extra=key))
    read = read_picture(file, 16)
    assert isinstance(read, Tensor)
    assert read.tolist() == [[[0xAB, 0xAB, 0xAB, 0], [0x12, 0x12, 0x12, 255]]]
    file.write_bytes(png(1, 1, depth=16, kind=6, data=b"\0\x12\x34\x56\x78\x9a\xbc\xff\xff"))
    read = read_picture(file, 16)
    assert isinstance(read, Tensor)
    assert read.tolist() == [[[0x12, 0x56, 0x9A, 255]]]


def sixteen() -> Image.Image:
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 256, (16, 16, 4), dtype=np.uint8))


def as_bytes(image: Image.Image, kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


@pytest.mark.parametrize(
    ("content", "flaw"),
    [
        (b"", Flaw("empty file")),
        (b"# a readme", Flaw("not a PNG, GIF, BMP or WebP image")),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", Flaw("not a PNG, GIF, BMP or WebP image")),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", Flaw("not a PNG, GIF, BMP or WebP image")),
        (b"\x89PNG\r\n\x1a\n", Flaw("damaged", "its header")),
        (png(5000, 5000), Flaw("too large", "5000x5000, at most 1024x1024 is read")),
        (png(16, 1025), Flaw("too large", "16x1025, at most 1024x1024 is read")),
        (png(60000, 60000), Flaw("too large")),
        (png(12000, 12000), Flaw("too large")),
    ],
)
def test_what_is_not_a_usable_picture(tmp_path: Path, content: bytes, flaw: Flaw) -> None:
    (tmp_path / "file.png").write_bytes(content)
    assert read_picture(tmp_path / "file.png", 1024) == flaw


@pytest.mark.parametrize("content", [png(0, 16), png(16, 0), png(0, 0)])
def test_pictures_without_pixels(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.png").write_bytes(content)
    assert isinstance(read_picture(tmp_path / "file.png", 1024), Flaw)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_what_moves_is_told_apart(tmp_path: Path, kind: str) -> None:
    first, second = sixteen(), sixteen().transpose(Image.Transpose.ROTATE_90)
    (tmp_path / "still").write_bytes(as_bytes(first, kind))
    (tmp_path / "moving").write_bytes(as_bytes(first, kind, save_all=True, append_images=[second]))
    assert isinstance(read_picture(tmp_path / "still", 1024), Tensor)
    assert read_picture(tmp_path / "moving", 1024) == Flaw("animated", "2 frames")


def test_a_file_that_cannot_be_opened_or_is_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_picture(tmp_path / "missing.png", 16) == Flaw("cannot be opened", "No such file or directory")
    assert read_picture(tmp_path, 16) == Flaw("cannot be opened", "Is a directory")
    (tmp_path / "large.png").write_bytes(as_bytes(sixteen(), "PNG"))
    monkeypatch.setattr(pictures, "_FILE_LIMIT", 512)
    assert read_picture(tmp_path / "large.png", 16).reason == "too large"  # type: ignore[union-attr]


@settings(deadline=None, max_examples=tries(30, 150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["PNG", "GIF", "BMP", "WEBP"]), st.data())
def test_whatever_happened_to_a_file_reading_it_returns(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    content = bytearray(as_bytes(sixteen(), kind))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "file").write_bytes(content[: data.draw(st.integers(1, len(content)))])
    read = read_picture(tmp_path / "file", 64)
    assert isinstance(read, Flaw) or (read.dtype == torch.uint8 and read.dim() == 3 and read.shape[2] == 4)


def test_few_colours_are_kept_exactly() -> None:
    rgba = torch.randint(0, 256, (1, 1, 16, 4), dtype=torch.uint8).repeat(4, 8, 3, 1)
    rgba[..., 3] = 255
    rgba[0, 0, :5, 3] = 127
    colours, counts = opaque_colours(rgba)
    assert counts.sum() == rgba[..., 3].ge(128).sum()
    palette = choose_palette(colours, counts)
    assert palette.shape == (17, 4)
    assert palette[0].tolist() == [0, 0, 0, 0]
    shown = look_up(nearest_colour(rgba, palette), palette)
    assert torch.equal(shown[rgba[..., 3] > 127], rgba[rgba[..., 3] > 127])


def test_palettes_go_from_dark_to_light_and_repeat_the_last() -> None:
    palette = choose_palette(np.array([[250, 250, 250], [0, 0, 80], [200, 0, 0]]), np.array([1, 2, 3]))
    assert palette[:, 2].tolist() == [0, 80, 0, 250, *[250] * 13]
    assert palette[1:, 3].tolist() == [255] * 16
    with pytest.raises(BadArgument, match="no opaque pixel"):
        choose_palette(np.zeros((0, 3), np.int64), np.zeros(0, np.int64))


colour_counts = st.dictionaries(st.tuples(*[st.integers(0, 255)] * 3), st.integers(1, 10**9), min_size=1, max_size=60)


@settings(deadline=None, max_examples=tries(20, 60))
@given(colour_counts)
def test_a_palette_is_made_of_the_colours_there_are(counted: dict[tuple[int, int, int], int]) -> None:
    colours, counts = np.array(sorted(counted)), np.array([counted[c] for c in sorted(counted)])
    palette = choose_palette(colours, counts)
    chosen = set(map(tuple, palette[1:, :3].tolist()))
    assert chosen <= set(counted)
    assert torch.equal(choose_palette(colours, counts), palette)
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
