"""Other people's pixel art as a `SpriteSet`: folders of images and sprite sheets, kept crisp, with a report."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotloop.apps.sprites.dataset import COLOURS, SIDE, SpriteSet
from hotloop.apps.sprites.pictures import Flaw, choose_palette, opaque_colours, read_picture
from hotloop.apps.sprites.pixels import OPAQUE, nearest_colour
from hotloop.errors import BadArgument
from hotloop.printing.text import plural, printable, shorten

IMAGE_LIMIT = 1024  # longest side of one sprite as an image
SHEET_LIMIT = 4096  # and of a sheet
_NAMES = 4  # how many names a line of the summary gives
_ADVICE = f"sprites are {SIDE}x{SIDE} PNG images or clean enlargements of such; sheets need their tile size"


@dataclass(frozen=True)
class Skipped:
    """An image, or a tile of a sheet, that was left out: why, and what is particular to this one."""

    path: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class ImportResult:
    """The sprites of an import and what became of everything else."""

    sprites: SpriteSet
    skipped: tuple[Skipped, ...]
    duplicates: int  # the same pixels in the same class
    empty: int  # tiles of a sheet with nothing on them
    colours: int  # distinct colours in the art

    @property
    def summary(self) -> tuple[str, ...]:
        """Lines of text for a person."""
        counts = torch.bincount(self.sprites.labels, minlength=len(self.sprites.classes)).tolist()
        classes = [f"{name} {count:,}" for name, count in zip(self.sprites.classes, counts, strict=True)]
        lines = [f"kept {plural(len(self.sprites), 'sprite')} in {plural(len(classes), 'class', 'classes')}"]
        lines.append(f"classes: {shorten(classes, 12)}")
        kept = "all kept" if self.colours <= COLOURS else "each as the nearest of 16"
        lines.append(f"colours: {self.colours:,} in the art, {kept}")
        if self.duplicates:
            lines.append(f"dropped {plural(self.duplicates, 'duplicate')}")
        if self.empty:
            lines.append(f"passed over {plural(self.empty, 'empty tile')}")
        return (*lines, *_by_reason(self.skipped))


def import_art(
    source: str | Path,
    *,
    tile: int | tuple[int, int] | None = None,
    margin: int = 0,
    spacing: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ImportResult:
    """Read every image under a folder, or one sprite sheet.

    Each image of a folder is one sprite or, with `tile` (width, height), a sheet of them; each subfolder is a class,
    and images beside them are one of the folder's own name. A single sheet is one class, named like the file, in tiles
    of 16x16 if nothing else is said. `margin` is the border around all tiles, `spacing` the gap between two.
    An image that cannot be used is reported in the result; `progress(done, total)` is called after each file.

    >>> import_art("my-sprites").summary  # doctest: +SKIP
    ('kept 120 sprites in 3 classes', 'classes: gem 40, potion 40, sword 40', ...)
    """
    source = Path(source)
    if not source.exists():
        raise BadArgument(f"there is no {printable(str(source))}", fix="give a folder of images, or one sprite sheet")
    single = not source.is_dir()
    if tile is None and single:
        tile = SIDE
    if tile is None and (margin or spacing):
        raise BadArgument(
            f"margin={margin}, spacing={spacing} without a tile size", fix="give the tile size too, such as 16x16"
        )
    grid = None if tile is None else _Grid.of(tile, margin, spacing)
    found = _Found([], [], [])
    files = [source] if single else list(_files(source, found))
    for done, path in enumerate(files, 1):
        parts = path.relative_to(source.parent if single else source).parts
        name = path.stem if single else parts[0] if len(parts) > 1 else source.resolve().name
        shown = printable("/".join(parts))
        try:
            found.add(_tiles_of(path, grid), printable(name or "sprites"), shown, is_sheet=grid is not None)
        except Flaw as flaw:
            found.skipped.append(Skipped(shown, flaw.reason, flaw.detail))
        if progress is not None:
            progress(done, len(files))
    if found.classes:
        return found.result(f"imported from {printable(source.resolve().name)}")
    what = plural(len(files), "file") if files else "it holds no images"
    what += f", {plural(found.empty, 'empty tile')}" if found.empty else ""
    what = f"nothing in {printable(str(source))} can be used: {what}"
    raise BadArgument("\n  ".join([what, *_by_reason(found.skipped)]), fix=_ADVICE)


@dataclass(frozen=True)
class _Grid:
    """How a sheet is cut."""

    width: int
    height: int
    margin: int
    spacing: int

    @classmethod
    def of(cls, tile: int | tuple[int, int], margin: int, spacing: int) -> "_Grid":
        width, height = (tile, tile) if isinstance(tile, int) else tile
        if min(width, height) < 1 or min(margin, spacing) < 0:
            raise BadArgument(
                f"tiles of {width}x{height}, margin={margin}, spacing={spacing}",
                fix="tiles are at least 1x1, margin and spacing 0 or more",
            )
        if not _suits(width, height):
            raise BadArgument(f"tiles of {width}x{height} cannot become {SIDE}x{SIDE}", fix=_ADVICE)
        return cls(width, height, margin, spacing)

    def fits(self, width: int, height: int) -> bool:
        """Whether a sheet of this size is a whole number of tiles, one or more."""
        across, columns_over = divmod(width - 2 * self.margin + self.spacing, self.width + self.spacing)
        down, rows_over = divmod(height - 2 * self.margin + self.spacing, self.height + self.spacing)
        return not (columns_over or rows_over) and min(across, down) >= 1

    def cut(self, sheet: Tensor) -> Tensor:
        """The tiles (n, h, w, 4) of a sheet that fits, row by row."""
        inner = sheet[self.margin : sheet.shape[0] - self.margin, self.margin : sheet.shape[1] - self.margin]
        rows = inner.unfold(0, self.height, self.height + self.spacing)
        return rows.unfold(1, self.width, self.width + self.spacing).permute(0, 1, 3, 4, 2).flatten(0, 1)


@dataclass
class _Found:
    """What an import has found so far."""

    sprites: list[Tensor]  # each (n, 16, 16, 4)
    classes: list[str]  # of each sprite
    skipped: list[Skipped]
    empty: int = 0

    def add(self, tiles: Tensor, name: str, shown: str, *, is_sheet: bool) -> None:
        """Take the sprites of a picture into a class, but those that cannot be made smaller."""
        present = (tiles[..., 3] > 0).flatten(1).any(1)
        numbers = torch.arange(len(tiles))[present]
        sprites, crisp = _fit(tiles[present])
        for number in numbers[~crisp].tolist():
            place = f"{shown} tile {number + 1}" if is_sheet else shown
            detail = f"{tiles.shape[2]}x{tiles.shape[1]}, not a clean enlargement"
            self.skipped.append(Skipped(place, "wrong size", detail))
        self.empty += len(tiles) - len(numbers)
        self.sprites.append(sprites[crisp])
        self.classes += [name] * int(crisp.sum())

    def result(self, source: str) -> ImportResult:
        rgba = torch.cat(self.sprites)
        colours, counts = opaque_colours(rgba)
        palette = choose_palette(colours, counts)
        classes = sorted(set(self.classes))
        labels = torch.tensor([classes.index(name) for name in self.classes])
        sprites = SpriteSet(nearest_colour(rgba, palette), labels, tuple(classes), palette, source)
        unique = sprites[_firsts(sprites.pixels, labels)]
        return ImportResult(unique, tuple(self.skipped), len(sprites) - len(unique), self.empty, len(colours))


def _tiles_of(path: Path, grid: _Grid | None) -> Tensor:
    """The sprites in a picture, (n, h, w, 4): itself, or the tiles of a sheet."""
    picture = read_picture(path, IMAGE_LIMIT if grid is None else SHEET_LIMIT)
    height, width = picture.shape[:2]
    if grid is not None:
        if not grid.fits(width, height):
            tile = f"{grid.width}x{grid.height}"
            raise Flaw("wrong size", f"{width}x{height}, not whole tiles of {tile} with this margin and spacing")
        return _clean(grid.cut(picture))
    if not _suits(width, height):
        raise Flaw("wrong size", f"{width}x{height}")
    tiles = _clean(picture[None])
    if not tiles.any():
        raise Flaw("fully transparent")
    return tiles


def _files(folder: Path, found: _Found) -> Iterator[Path]:
    """Every file below a folder in a fixed order: nothing hidden, and no folder behind a link."""

    def unreadable(error: OSError) -> None:
        shown = printable(Path(error.filename).relative_to(folder).as_posix())
        found.skipped.append(Skipped(shown, "cannot be opened", error.strerror or ""))

    for place, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(place, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if os.path.isfile(path))  # noqa: PTH113  # `is_file` raises in a closed folder


def _suits(width: int, height: int) -> bool:
    """Whether a picture of this size can become a sprite without being resampled."""
    enlarged = width == height <= IMAGE_LIMIT and width % SIDE == 0
    return enlarged or max(width, height) <= SIDE


def _clean(tiles: Tensor) -> Tensor:
    """Every pixel either opaque or all zero, so that what cannot be seen makes no difference."""
    opaque = tiles[..., 3:] >= OPAQUE
    return torch.cat([tiles[..., :3] * opaque, opaque * tiles.new_tensor(255)], -1)


def _fit(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles (n, h, w, 4) of a size that suits as (n, 16, 16, 4), and which of them lost nothing by it."""
    count, height, width, _ = tiles.shape
    if max(height, width) <= SIDE:
        top, left = (SIDE - height) // 2, (SIDE - width) // 2
        whole = tiles.new_zeros(count, SIDE, SIDE, 4)
        whole[:, top : top + height, left : left + width] = tiles
        return whole, torch.ones(count, dtype=torch.bool)
    factor = width // SIDE
    blocks = tiles.view(count, SIDE, factor, SIDE, factor, 4)
    corner = blocks[:, :, :1, :, :1]
    return corner[:, :, 0, :, 0], (blocks == corner).flatten(1).all(1)


def _firsts(pixels: Tensor, labels: Tensor) -> Tensor:
    """The positions, in order, of the sprites that are not a repetition of an earlier one in their class."""
    rows = np.concatenate([labels[:, None].numpy().view(np.uint8), pixels.flatten(1).numpy()], axis=1)
    return torch.from_numpy(np.sort(np.unique(rows, axis=0, return_index=True)[1]))


def _by_reason(skipped: Sequence[Skipped]) -> list[str]:
    """A line for each reason, with the first few names."""
    lines = []
    for reason, count in Counter(item.reason for item in skipped).most_common():
        names = [f"{s.path} ({s.detail})" if s.detail else s.path for s in skipped if s.reason == reason]
        lines.append(f"skipped {count:,}, {reason}: {shorten(names, _NAMES)}")
    return lines
