"""Other people's pixel art as a `SpriteSet`: folders of images and sprite sheets, kept crisp, with a report."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
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
FILE_LIMIT = 1_000_000  # files below one folder: their sprites take 1 GB
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
    kept: int
    skipped: tuple[Skipped, ...]
    duplicates: int  # the same pixels in the same class
    empty: int  # tiles of a sheet with nothing on them
    colours: int  # distinct colours in the art
    exact: bool  # whether the palette holds all of them

    @property
    def summary(self) -> tuple[str, ...]:
        """Lines of text for a person."""
        counts = torch.bincount(self.sprites.labels, minlength=len(self.sprites.classes)).tolist()
        classes = [f"{name} {count:,}" for name, count in zip(self.sprites.classes, counts, strict=True)]
        lines = [f"kept {plural(self.kept, 'sprite')} in {plural(len(classes), 'class', 'classes')}"]
        lines.append(f"classes: {shorten(classes, 12)}")
        lines.append(
            f"colours: {self.colours:,} in the art, {'all kept' if self.exact else 'each as the nearest of 16'}"
        )
        if self.duplicates:
            lines.append(f"dropped {plural(self.duplicates, 'duplicate')}")
        if self.empty:
            lines.append(f"passed over {plural(self.empty, 'empty tile')}")
        return (*lines, *_by_reason(self.skipped))


def import_folder(
    folder: str | Path,
    *,
    tile: int | tuple[int, int] | None = None,
    margin: int = 0,
    spacing: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ImportResult:
    """Read every image under a folder: one class for each subfolder, and the folder's own name for images beside them.

    Each image is one sprite or, with `tile` (width, height), a sheet of them. `progress(done, total)` is called after
    each file. An image that cannot be used is reported in the result and never ends the import.

    >>> import_folder("my-sprites").summary  # doctest: +SKIP
    ('kept 120 sprites in 3 classes', 'classes: gem 40, potion 40, sword 40', ...)
    """
    folder = Path(folder)
    if not folder.is_dir():
        fix = "for one sprite sheet use import_sheet" if folder.is_file() else "give a folder of PNG images"
        raise BadArgument(f"{printable(str(folder))} is not a folder", fix=fix)
    if tile is None and (margin or spacing):
        raise BadArgument(
            f"margin={margin}, spacing={spacing} without a tile size", fix="give the tile size too: tile=16"
        )
    grid = None if tile is None else _Grid.of(tile, margin, spacing)
    gathered = _Gathered(folder, grid)
    files = list(islice(_files(folder, gathered), FILE_LIMIT + 1))
    if len(files) > FILE_LIMIT:
        raise BadArgument(
            f"there are more than {FILE_LIMIT:,} files in {printable(str(folder))}", fix="give a folder of images alone"
        )
    for done, path in enumerate(files, 1):
        parts = path.relative_to(folder).parts
        name = parts[0] if len(parts) > 1 else folder.resolve().name
        picture = read_picture(path, IMAGE_LIMIT if grid is None else SHEET_LIMIT)
        gathered.add(picture, printable("/".join(parts)), printable(name or "sprites"))
        if progress is not None:
            progress(done, len(files))
    return gathered.result()


def import_sheet(
    path: str | Path, tile: int | tuple[int, int] = (SIDE, SIDE), margin: int = 0, spacing: int = 0
) -> ImportResult:
    """Cut one sprite sheet into its tiles (width, height), all of one class, which is named like the file.

    `margin` is the border around all tiles, `spacing` the gap between two.

    >>> import_sheet("dungeon.png", tile=16, spacing=1).kept  # doctest: +SKIP
    132
    """
    path = Path(path)
    if not path.is_file():
        raise BadArgument(f"there is no file {printable(str(path))}", fix="give the path of a sprite sheet")
    grid = _Grid.of(tile, margin, spacing)
    picture = read_picture(path, SHEET_LIMIT)
    if isinstance(picture, Flaw):
        detail = f" ({picture.detail})" if picture.detail else ""
        raise BadArgument(f"{printable(str(path))}: {picture.reason}{detail}", fix="give a sprite sheet as a PNG file")
    height, width = picture.shape[:2]
    if grid.counts(width, height) is None:
        raise BadArgument(f"{printable(str(path))}: {width}x{height} is not {grid}", fix=grid.advice(width, height))
    gathered = _Gathered(path, grid)
    gathered.add(picture, printable(path.name), printable(path.stem))
    return gathered.result()


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

    def counts(self, width: int, height: int) -> tuple[int, int] | None:
        """Columns and rows of a sheet of this size; None where they do not come out even."""
        across, columns_over = divmod(width - 2 * self.margin + self.spacing, self.width + self.spacing)
        down, rows_over = divmod(height - 2 * self.margin + self.spacing, self.height + self.spacing)
        return None if columns_over or rows_over or min(across, down) < 1 else (across, down)

    def advice(self, width: int, height: int) -> str:
        """The smallest margins and spacings that would fit a sheet of this size."""
        tried = [_Grid(self.width, self.height, total - s, s) for total in range(2 * SIDE) for s in range(total + 1)]
        fitting = [f"margin={g.margin}, spacing={g.spacing}" for g in tried if g.counts(width, height) is not None]
        return (
            f"what fits: {'; or '.join(fitting[:3])}" if fitting else "no margin and spacing fit; check the tile size"
        )

    def __str__(self) -> str:
        return f"a whole number of {self.width}x{self.height} tiles with margin={self.margin}, spacing={self.spacing}"

    def cut(self, sheet: Tensor) -> Tensor:
        """The tiles (n, h, w, 4) of a sheet that fits, row by row."""
        inner = sheet[self.margin : sheet.shape[0] - self.margin, self.margin : sheet.shape[1] - self.margin]
        rows = inner.unfold(0, self.height, self.height + self.spacing)
        return rows.unfold(1, self.width, self.width + self.spacing).permute(0, 1, 3, 4, 2).flatten(0, 1)


class _Gathered:
    """What an import from a source has found so far."""

    def __init__(self, source: Path, grid: _Grid | None) -> None:
        self.source = source
        self.grid = grid
        self.sprites: list[Tensor] = []  # each (n, 16, 16, 4)
        self.classes: list[str] = []  # of each sprite
        self.skipped: list[Skipped] = []
        self.empty = 0
        self.files = 0

    def skip(self, path: str, flaw: Flaw) -> None:
        self.skipped.append(Skipped(path, flaw.reason, flaw.detail))

    def add(self, picture: Tensor | Flaw, shown: str, name: str) -> None:
        """Take the sprites of a picture into a class, or note what is wrong with it."""
        self.files += 1
        tiles = picture if isinstance(picture, Flaw) else self._tiles(picture)
        if isinstance(tiles, Flaw):
            self.skip(shown, tiles)
            return
        present = (tiles[..., 3] > 0).flatten(1).any(1)
        numbers = torch.arange(len(tiles))[present]
        sprites, crisp = _fit(tiles[present])
        for number in numbers[~crisp].tolist():
            place = shown if self.grid is None else f"{shown} tile {number + 1}"
            self.skip(place, Flaw("wrong size", f"{tiles.shape[2]}x{tiles.shape[1]}, not a clean enlargement"))
        self.empty += len(tiles) - len(numbers)
        self.sprites.append(sprites[crisp])
        self.classes += [name] * int(crisp.sum())

    def _tiles(self, picture: Tensor) -> Tensor | Flaw:
        height, width = picture.shape[:2]
        if self.grid is not None:
            if self.grid.counts(width, height) is None:
                return Flaw("wrong size", f"{width}x{height}; {self.grid.advice(width, height)}")
            return _clean(self.grid.cut(picture))
        if not _suits(width, height):
            return Flaw("wrong size", f"{width}x{height}")
        tiles = _clean(picture[None])
        return tiles if tiles.any() else Flaw("fully transparent")

    def result(self) -> ImportResult:
        if not self.classes:
            what = f"nothing in {printable(str(self.source))} can be used: {self._found()}"
            raise BadArgument("\n  ".join([what, *_by_reason(self.skipped)]), fix=_ADVICE)
        rgba = torch.cat(self.sprites)
        colours, counts = opaque_colours(rgba)
        palette = choose_palette(colours, counts)
        pixels = nearest_colour(rgba, palette)
        classes = sorted(set(self.classes))
        label = {name: number for number, name in enumerate(classes)}
        labels = torch.tensor([label[name] for name in self.classes])
        source = f"imported from {printable(self.source.resolve().name)}"
        sprites = SpriteSet(pixels, labels, tuple(classes), palette, source)
        unique = sprites[_firsts(pixels, labels)]
        return ImportResult(
            sprites=unique,
            kept=len(unique),
            skipped=tuple(self.skipped),
            duplicates=len(sprites) - len(unique),
            empty=self.empty,
            colours=len(colours),
            exact=len(colours) <= COLOURS,
        )

    def _found(self) -> str:
        if not self.files:
            return "it holds no images"
        return plural(self.files, "file") + (f", {plural(self.empty, 'empty tile')}" if self.empty else "")


def _files(folder: Path, gathered: _Gathered) -> Iterator[Path]:
    """Every file below a folder in a fixed order: nothing hidden, no folder twice, and no link that leads elsewhere."""

    def skip(path: Path, flaw: Flaw) -> None:
        gathered.skip(printable(path.relative_to(folder).as_posix()), flaw)

    def unreadable(error: OSError, path: Path | None = None) -> None:
        skip(path or Path(error.filename), Flaw("cannot be opened", error.strerror or ""))

    root, seen = Path(os.path.realpath(folder)), set()

    def stays(path: Path) -> bool:
        try:
            target = os.path.realpath(path) if path.is_symlink() else ""
        except OSError as error:
            unreadable(error, path)
            return False
        if target and not Path(target).is_relative_to(root):
            skip(path, Flaw("links out of the folder", printable(target)))
            return False
        return True

    for place, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and stays(Path(place, name)))
        paths = (Path(place, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if stays(path) and _is_file(path))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # reading it will say what is wrong
        return True


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
    keys = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1]))).squeeze(1)
    return torch.from_numpy(np.sort(np.unique(keys, return_index=True)[1]))


def _by_reason(skipped: Iterable[Skipped]) -> list[str]:
    """A line for each reason, with the first few names."""
    skipped = list(skipped)
    lines = []
    for reason, count in Counter(item.reason for item in skipped).most_common():
        names = [f"{s.path} ({s.detail})" if s.detail else s.path for s in skipped if s.reason == reason]
        lines.append(f"skipped {count:,}, {reason}: {shorten(names, _NAMES)}")
    return lines
