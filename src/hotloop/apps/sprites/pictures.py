"""Pictures in files: PNG written whole, images of unknown origin read with care, and a palette chosen for them."""

import io
import warnings
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from hotloop.apps.sprites.dataset import COLOURS, SIDE, SpriteSet
from hotloop.apps.sprites.pixels import OPAQUE, contact_sheet, look_up, nearest_colour, upscale
from hotloop.errors import BadArgument
from hotloop.files.whole import write_whole
from hotloop.printing.text import printable, size

INK = (34, 32, 52, 255)  # a background on which sprites stand out
GAP = 4  # pixels between the sprites of a sheet
FORMATS = ("PNG", "GIF", "BMP", "WEBP")
_SIGNATURES = (b"\x89PNG", b"GIF8", b"BM", b"RIFF")
_FILE_LIMIT = 64 << 20  # bytes; a picture of 4096x4096 without any compression
_SHEET_LIMIT = 64_000_000  # pixels that a viewer still opens
_ROUNDS = 16  # of refining a palette; it mostly settles in fewer

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Flaw:
    """Why a picture cannot be used: the kind of reason, and what is particular to this one."""

    reason: str
    detail: str = ""


def save_png(path: str | Path, rgba: Tensor) -> None:
    """Write uint8 (h, w, 4) as a PNG file; it appears whole or not at all.

    >>> save_png("sheet.png", sheet_of(sprites, 8))  # doctest: +SKIP
    """
    if rgba.dtype != torch.uint8 or rgba.dim() != 3 or rgba.shape[2] != 4 or not rgba.numel():
        raise BadArgument(f"a picture of {rgba.dtype} {tuple(rgba.shape)}", fix="give uint8 (h, w, 4), not empty")
    data = io.BytesIO()
    Image.fromarray(rgba.cpu().contiguous().numpy()).save(data, "PNG")
    write_whole(Path(path), data.getvalue())


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


def read_picture(path: Path, limit: int) -> Tensor | Flaw:
    """The picture in a file as uint8 (h, w, 4) RGBA, or what is wrong with it; `limit` is its longest side.

    Whatever the file holds, this returns: its size is looked at before anything is decoded.
    """
    try:
        length = path.stat().st_size
        if not 0 < length <= _FILE_LIMIT:
            return Flaw("too large", f"a file of {size(length)}") if length else Flaw("empty file")
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Pillow thinks of metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return _decode(file, limit)
    except OSError as error:
        if error.errno is not None:
            return Flaw("cannot be opened", error.strerror or "")
        return Flaw("damaged", _words(error))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return Flaw("too large")
    except Exception as error:  # noqa: BLE001  # Pillow's decoders raise nearly anything on a damaged file
        return Flaw("damaged", _words(error))


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


def choose_palette(colours: Integers, counts: Integers, limit: int = COLOURS) -> Tensor:
    """A palette uint8 (limit + 1, 4) for colours that occur so often: exactly these, or the best of them if too many.

    Every row is one of the colours, from dark to light after the transparent row 0; rows that are left over repeat
    the last. The same colours give the same palette anywhere: all of it is integer arithmetic.

    >>> choose_palette(np.array([[255, 255, 255], [0, 0, 0]]), np.array([1, 1]), limit=2).tolist()
    [[0, 0, 0, 0], [0, 0, 0, 255], [255, 255, 255, 255]]
    """
    if not len(colours):
        raise BadArgument("there is no opaque pixel to take a colour from", fix="give pictures that show something")
    chosen = colours if len(colours) <= limit else _reduce(colours, counts, limit)
    chosen = chosen[np.argsort(chosen @ np.array([299, 587, 114]), kind="stable")]
    rows = np.concatenate([chosen, np.repeat(chosen[-1:], limit - len(chosen), axis=0)])
    palette = torch.zeros(limit + 1, 4, dtype=torch.uint8)
    palette[1:, :3] = torch.from_numpy(rows)
    palette[1:, 3] = 255
    return palette


def _decode(file: io.BufferedReader, limit: int) -> Tensor | Flaw:
    known = file.peek(4).startswith(_SIGNATURES)
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        return Flaw("damaged", "its header") if known else Flaw("not a PNG, GIF, BMP or WebP image")
    with image:
        width, height = image.size
        if min(width, height) < 1:
            return Flaw("no pixels", f"{width}x{height}")
        if max(width, height) > limit:
            return Flaw("too large", f"{width}x{height}, at most {limit}x{limit} is read")
        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            return Flaw("animated", f"{frames} frames")
        return torch.from_numpy(_grey16(image) if image.mode.startswith("I") else np.array(image.convert("RGBA")))


def _grey16(image: Image.Image) -> NDArray[np.uint8]:
    """16-bit grey as RGBA by its upper 8 bits; Pillow itself would cut it off at 255."""
    levels = np.array(image).astype(np.int64)
    grey = (levels >> 8).clip(0, 255)
    alpha = np.where(levels == image.info.get("transparency", -1), 0, 255)
    return np.stack([grey, grey, grey, alpha], axis=-1).astype(np.uint8)


def _words(error: Exception) -> str:
    return printable(str(error).splitlines()[0] if str(error) else type(error).__name__)[:120]


def _reduce(colours: Integers, counts: Integers, limit: int) -> Integers:
    """At most `limit` of the colours: boxes cut where it saves most error, refined by k-means, snapped to colours."""
    boxes = [(*_spread(colours, counts), np.arange(len(colours)))]
    while len(boxes) < limit:
        boxes.sort(key=lambda box: box[0])  # stable, so that equals keep their order
        _, channel, members = boxes.pop()
        below = _cut(colours[members, channel], counts[members])
        for part in (members[below], members[~below]):
            boxes.append((*_spread(colours[part], counts[part]), part))
    centres = np.stack([_mean(colours[members], counts[members]) for _, _, members in boxes])
    for _ in range(_ROUNDS):
        nearest = _nearest(colours, centres)
        groups = [nearest == index for index in range(limit)]
        alone = sum(not group.any() for group in groups)  # such a centre goes where the error is greatest
        worst = iter(np.argsort(-counts * _distance(colours, centres[nearest]), kind="stable") if alone else ())
        moved = [_mean(colours[group], counts[group]) if group.any() else colours[next(worst)] for group in groups]
        if np.array_equal(moved, centres):
            break
        centres = np.stack(moved)
    nearest = _nearest(colours, centres)
    order = np.lexsort((-counts, _distance(colours, centres[nearest]), nearest))  # the best of each group comes first
    return colours[order[np.unique(nearest[order], return_index=True)[1]]]


def _spread(colours: Integers, counts: Integers) -> tuple[int, int]:
    """The squared error of the channel that varies most, and which it is; Python's integers cannot overflow."""
    total = int(counts.sum())
    sums, squares = counts @ colours, counts @ (colours * colours)
    errors = [int(square) - int(mean) ** 2 // total for mean, square in zip(sums, squares, strict=True)]
    return max(errors), errors.index(max(errors))


def _cut(levels: Integers, counts: Integers) -> NDArray[np.bool_]:
    """Which lie below the level that parts them with the least squared error; never all of them, and never none."""
    present, place = np.unique(levels, return_inverse=True)
    many = [int(n) for n in np.cumsum(_totals(place, counts))]
    sums = [int(n) for n in np.cumsum(_totals(place, counts * levels))]
    gains = [
        Fraction(sums[i] ** 2, many[i]) + Fraction((sums[-1] - sums[i]) ** 2, many[-1] - many[i])
        for i in range(len(present) - 1)
    ]
    below: NDArray[np.bool_] = place <= gains.index(max(gains))
    return below


def _totals(place: Integers, values: Integers) -> Integers:
    totals = np.zeros(int(place.max()) + 1, np.int64)
    np.add.at(totals, place, values)
    return totals


def _mean(colours: Integers, counts: Integers) -> Integers:
    total = counts.sum()
    rounded: Integers = (2 * (counts @ colours) + total) // (2 * total)
    return rounded


def _nearest(colours: Integers, centres: Integers) -> Integers:
    """For each colour, which centre is nearest."""
    palette = torch.from_numpy(np.concatenate([np.zeros((1, 4), np.uint8), _opaque(centres)]))
    indices = nearest_colour(torch.from_numpy(_opaque(colours)).view(1, 1, -1, 4), palette)
    nearest: Integers = indices.flatten().numpy().astype(np.int64) - 1
    return nearest


def _distance(colours: Integers, others: Integers) -> Integers:
    squared: Integers = ((colours - others) ** 2).sum(1)
    return squared


def _opaque(colours: Integers) -> NDArray[np.uint8]:
    return np.concatenate([colours, np.full((len(colours), 1), 255)], axis=1).astype(np.uint8)
