"""Pictures in files: PNG written whole, images of unknown origin read with care, and a palette chosen for them."""

import io
import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from hotloop.apps.sprites.dataset import COLOURS, SIDE, SpriteSet
from hotloop.apps.sprites.pixels import OPAQUE, contact_sheet, look_up, upscale
from hotloop.errors import BadArgument
from hotloop.printing.text import printable, size
from hotloop.records.files import write_whole

INK = (34, 32, 52, 255)  # a background on which sprites stand out
GAP = 4  # pixels between the sprites of a sheet
FORMATS = ("PNG", "GIF", "BMP", "WEBP")
_FILE_LIMIT = 64 << 20  # bytes; a picture of 4096x4096 without any compression
_SHEET_LIMIT = 64_000_000  # pixels that a viewer still opens
_WEIGHED = 1 << 20  # pixels that stand for all when a palette is chosen

Integers = NDArray[np.int64]


class Flaw(Exception):
    """Why a picture cannot be used: the kind of reason, and what is particular to this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def save_png(path: str | Path, rgba: Tensor) -> None:
    """Write uint8 (h, w, 4) as a PNG file; it appears whole or not at all.

    >>> save_png("sheet.png", sheet_of(sprites, 8))  # doctest: +SKIP
    """
    write_whole(Path(path), png_of(rgba))


def png_of(rgba: Tensor) -> bytes:
    """The content of such a file."""
    data = io.BytesIO()
    Image.fromarray(rgba.cpu().contiguous().numpy()).save(data, "PNG", optimize=True)
    return data.getvalue()


def sheet_of(sprites: SpriteSet, columns: int, scale: int = 4) -> Tensor:
    """One RGBA picture (h, w, 4) of all sprites, each enlarged `scale` times.

    >>> sheet_of(sprites[:64], columns=8).shape  # doctest: +SKIP
    torch.Size([548, 548, 4])
    """
    must_fit_a_sheet(len(sprites), scale)
    palette = sprites.palette.clone()
    palette[0] = torch.tensor(INK, dtype=torch.uint8)
    return contact_sheet(look_up(upscale(sprites.pixels, scale), palette), columns, GAP, INK)


def must_fit_a_sheet(count: int, scale: int) -> None:
    """Refuse a sheet that no viewer would open; to be asked before the sprites for it are drawn."""
    if count * (SIDE * scale + GAP) ** 2 > _SHEET_LIMIT:
        raise BadArgument(
            f"a sheet of {count:,} sprites at scale {scale} is too large", fix="show fewer, or at a smaller scale"
        )


def read_picture(path: Path, limit: int) -> Tensor:
    """The picture in a file as uint8 (h, w, 4) RGBA; `limit` is its longest side.

    Whatever the file holds, nothing but a `Flaw` is raised: its size is looked at before anything is decoded.
    """
    try:
        length = path.stat().st_size
        if length > _FILE_LIMIT:
            raise Flaw("too large", f"a file of {size(length)}")
        if not length:
            raise Flaw("empty file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Pillow thinks of metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return _decode(path, limit)
    except Flaw:
        raise
    except UnidentifiedImageError as error:
        raise Flaw("not a PNG, GIF, BMP or WebP image") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise Flaw("too large") from error
    except Exception as error:  # Pillow's decoders raise nearly anything on a damaged file
        if isinstance(error, OSError) and error.errno is not None:
            raise Flaw("cannot be opened", error.strerror or "") from error
        raise Flaw("damaged", printable(str(error).partition("\n")[0] or type(error).__name__)[:120]) from error


def _decode(path: Path, limit: int) -> Tensor:
    with Image.open(path, formats=FORMATS) as image:
        width, height = image.size
        if max(width, height) > limit:
            raise Flaw("too large", f"{width}x{height}, at most {limit}x{limit} is read")
        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            raise Flaw("animated", f"{frames} frames")
        if image.mode.startswith("I"):  # Pillow would cut its levels off at 255
            raise Flaw("16-bit grey", "save it with 8 bits")
        return torch.from_numpy(np.array(image.convert("RGBA")))


def opaque_colours(rgba: Tensor) -> tuple[Integers, Integers]:
    """The distinct colours (m, 3) of the pixels that are there, in ascending order, and how often each occurs.

    >>> colours, counts = opaque_colours(torch.tensor([[9, 8, 7, 255], [9, 8, 7, 255], [0, 0, 0, 0]]).byte())
    >>> colours.tolist(), counts.tolist()
    ([[9, 8, 7]], [2])
    """
    levels = rgba.reshape(-1, 4)
    levels = levels[levels[:, 3] >= OPAQUE].to(torch.int32)
    packed, counts = torch.unique(levels[:, 0] << 16 | levels[:, 1] << 8 | levels[:, 2], return_counts=True)
    colours = torch.stack([packed >> 16, packed >> 8 & 255, packed & 255], 1)
    return colours.long().cpu().numpy(), counts.cpu().numpy()


def choose_palette(colours: Integers, counts: Integers) -> Tensor:
    """A palette uint8 (17, 4) for colours that occur so often: exactly these, or the best of them if too many.

    Every row is one of the colours, from dark to light after the transparent row 0; rows that are left over repeat
    the last.

    >>> choose_palette(np.array([[255, 255, 255], [0, 0, 0]]), np.array([1, 1]))[:3].tolist()
    [[0, 0, 0, 0], [0, 0, 0, 255], [255, 255, 255, 255]]
    """
    chosen = colours if len(colours) <= COLOURS else _reduce(colours, counts)
    chosen = chosen[np.argsort(chosen @ np.array([299, 587, 114]), kind="stable")]
    rows = np.concatenate([chosen, np.repeat(chosen[-1:], COLOURS - len(chosen), axis=0)])
    palette = torch.zeros(COLOURS + 1, 4, dtype=torch.uint8)
    palette[1:, :3] = torch.from_numpy(rows)
    palette[1:, 3] = 255
    return palette


def _reduce(colours: Integers, counts: Integers) -> Integers:
    """At most 16 of the colours: those nearest to the palette that Pillow makes."""
    weights = (counts.astype(float) / counts.sum() * _WEIGHED).astype(np.int64).clip(min=1)
    pixels = Image.fromarray(colours.repeat(weights, axis=0)[None].astype(np.uint8))
    found = pixels.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1).getpalette() or []
    centres = np.array(found[: 3 * COLOURS]).reshape(-1, 3)
    nearest = [((colours - centre) ** 2).sum(1).argmin() for centre in centres]
    chosen: Integers = colours[np.unique(nearest)]
    return chosen
