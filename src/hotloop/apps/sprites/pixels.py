"""Pixel operations on whole batches of sprites, on any device, exact: integers only, no loop over pixels.

Sprites are uint8 (n, h, w) palette indices, 0 being transparent; pictures are uint8 (n, h, w, 4) RGBA; a palette is
uint8 (k, 4) RGBA with row 0 transparent. Nothing here waits for a GPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotloop.apps.sprites.dataset import COLOURS, TRANSPARENT
from hotloop.errors import BadArgument

OPAQUE = 128  # the least alpha that counts as there
_INDICES = 256  # what fits in a uint8
_KEYS_ON_CPU, _KEYS_ELSEWHERE = 1 << 21, 1 << 26  # colour comparisons at a time: what fits the cache, or fills a GPU


def look_up(pixels: Tensor, palette: Tensor) -> Tensor:
    """The RGBA colours that indices stand for.

    >>> look_up(torch.tensor([[[0, 1]]], dtype=torch.uint8), torch.tensor([[0] * 4, [9, 8, 7, 255]]).byte()).tolist()
    [[[[0, 0, 0, 0], [9, 8, 7, 255]]]]
    """
    _expect(pixels, "pixels", "(n, h, w)")
    _expect(palette, "palette", "(k, 4)")
    return _through(pixels, palette, "palette")


def nearest_colour(rgba: Tensor, palette: Tensor) -> Tensor:
    """The index of the palette's nearest colour for each pixel; alpha below 128 is transparent.

    Nearest is by squared RGB distance over rows 1 and up, and the first of equals.

    >>> palette = torch.tensor([[0] * 4, [0, 0, 0, 255], [255, 255, 255, 255]]).byte()
    >>> nearest_colour(torch.tensor([[[[200, 190, 180, 255], [10, 20, 30, 127]]]]).byte(), palette).tolist()
    [[[2, 0]]]
    """
    _expect(rgba, "rgba", "(n, h, w, 4)")
    _expect(palette, "palette", "(k, 4)")
    if not 2 <= len(palette) <= _INDICES:
        raise BadArgument(f"a palette of {len(palette)} rows", fix=f"give 2 to {_INDICES}, the first is transparent")
    flat = rgba.reshape(-1, 4)
    found = flat.new_empty(len(flat))
    step = (_KEYS_ON_CPU if rgba.device.type == "cpu" else _KEYS_ELSEWHERE) // len(palette)
    for colours, indices in zip(flat.split(step), found.split(step), strict=True):
        indices.copy_(_nearest(colours, palette))
    return found.view(rgba.shape[:-1])


def dither(rgba: Tensor, palette: Tensor, strength: int = 32) -> Tensor:
    """Palette indices with a 4x4 ordered pattern of `strength` brightness levels where a colour lies between two.

    A strength of 0 is `nearest_colour`.

    >>> palette = torch.tensor([[0] * 4, [0, 0, 0, 255], [255, 255, 255, 255]]).byte()
    >>> grey = torch.full((1, 2, 4, 4), 127, dtype=torch.uint8).index_fill(3, torch.tensor(3), 255)
    >>> dither(grey, palette, strength=64).tolist()
    [[[1, 2, 1, 2], [2, 1, 2, 1]]]
    """
    _expect(rgba, "rgba", "(n, h, w, 4)")
    if not 0 <= strength <= 255:
        raise BadArgument(f"strength={strength}", fix="give 0 (no dithering) to 255")
    levels = (2 * _bayer(rgba.shape[1], rgba.shape[2], rgba.device) - 15) * strength // 32
    shifted = rgba.to(torch.int16)
    shifted[..., :3] += levels[..., None]
    return nearest_colour(shifted.clamp_(0, 255).to(torch.uint8), palette)


def flip(pixels: Tensor, which: Tensor | None = None, *, vertical: bool = False) -> Tensor:
    """Sprites or pictures mirrored left to right, or top to bottom; with a mask `which` (n,) only some of them.

    >>> flip(torch.tensor([[[1, 2, 3]]]).byte()).tolist()
    [[[3, 2, 1]]]
    """
    _expect_batch(pixels)
    flipped = pixels.flip(1 if vertical else 2)
    if which is None:
        return flipped
    if which.shape != pixels.shape[:1]:
        raise BadArgument(f"which is {_shape(which)} for {len(pixels)} sprites", fix="give one value for each sprite")
    return torch.where(which.bool().view(-1, *[1] * (pixels.dim() - 1)), flipped, pixels)


def rotate(pixels: Tensor, quarter_turns: int = 1) -> Tensor:
    """Sprites or pictures turned counter-clockwise.

    >>> rotate(torch.tensor([[[1, 2], [3, 4]]]).byte()).tolist()
    [[[2, 4], [1, 3]]]
    """
    _expect_batch(pixels)
    return torch.rot90(pixels, quarter_turns % 4, (1, 2)).contiguous()


def outline(pixels: Tensor, colour: int) -> Tensor:
    """Sprites with every transparent pixel that touches an opaque one, by a side, painted in `colour`, an index.

    >>> outline(torch.tensor([[[0, 0, 5, 0]]]).byte(), 1).tolist()
    [[[0, 1, 5, 1]]]
    """
    _expect(pixels, "pixels", "(n, h, w)")
    if not TRANSPARENT < colour < _INDICES:
        raise BadArgument(f"colour={colour}", fix=f"give an index from 1 to {COLOURS}")
    opaque = pixels.clamp(max=1)  # 0 and 1 as uint8: several times faster than bool
    touched = torch.zeros_like(opaque)
    touched[:, 1:] |= opaque[:, :-1]
    touched[:, :-1] |= opaque[:, 1:]
    touched[:, :, 1:] |= opaque[:, :, :-1]
    touched[:, :, :-1] |= opaque[:, :, 1:]
    return pixels + (touched & ~opaque) * colour  # where there is an edge, the pixel is 0


def shift_hue(pixels: Tensor, mapping: Tensor) -> Tensor:
    """Sprites recoloured: index i becomes `mapping[i]`.

    >>> shift_hue(torch.tensor([[[0, 1, 2]]]).byte(), torch.tensor([0, 2, 1]).byte()).tolist()
    [[[0, 2, 1]]]
    """
    _expect(pixels, "pixels", "(n, h, w)")
    _expect(mapping, "mapping", "(k)")
    return _through(pixels, mapping, "mapping")


def upscale(pixels: Tensor, factor: int) -> Tensor:
    """Sprites or pictures enlarged crisply: every pixel becomes a block of `factor` x `factor`.

    >>> upscale(torch.tensor([[[1, 2]]]).byte(), 2).tolist()
    [[[1, 1, 2, 2], [1, 1, 2, 2]]]
    """
    _expect_batch(pixels)
    if factor < 1:
        raise BadArgument(f"factor={factor}", fix="give 1 or more")
    wide = torch.stack([pixels] * factor, 3).flatten(2, 3)
    return torch.stack([wide] * factor, 2).flatten(1, 2)


def contact_sheet(images: Tensor, columns: int, gap: int = 1, background: Sequence[int] = (0, 0, 0, 0)) -> Tensor:
    """Pictures laid out in rows of `columns`, `gap` pixels between and around them.

    >>> contact_sheet(torch.full((3, 2, 2, 4), 7).byte(), columns=2).shape
    torch.Size([7, 7, 4])
    """
    _expect(images, "images", "(n, h, w, 4)")
    count, height, width, _ = images.shape
    if not count or columns < 1 or gap < 0:
        raise BadArgument(
            f"{count} images, columns={columns}, gap={gap}",
            fix="give at least one image and column, a gap of 0 or more",
        )
    columns = min(columns, count)
    rows = -(-count // columns)
    sheet = images.new_empty(rows * (height + gap) + gap, columns * (width + gap) + gap, 4)
    for channel, level in enumerate(background):
        sheet[..., channel] = level  # a tensor of all four would be copied to a GPU, which waits
    cells = sheet[gap:, gap:].unflatten(1, (columns, width + gap)).unflatten(0, (rows, height + gap))
    cells = cells[:, :height, :, :width].transpose(1, 2)  # (rows, columns, height, width, 4), a view of the sheet
    full = count // columns
    cells[:full] = images[: full * columns].unflatten(0, (full, columns))
    if count % columns:
        cells[full, : count % columns] = images[full * columns :]
    return sheet


def _nearest(colours: Tensor, palette: Tensor) -> Tensor:
    """`nearest_colour` of (m, 4), in memory of m times the palette.

    Of the distance |p|² - 2pc + |c|² the first term is the same for all c, so it is left out. What remains is below
    2¹⁸ in size: with the index in its lowest 8 bits it fits an int32, whose minimum is the nearest, first of equals.
    """
    centres = palette[1:, :3].to(torch.int32)
    indices = torch.arange(1, len(palette), device=palette.device, dtype=torch.int32)
    keys: Tensor | None = None
    for channel in range(3):
        levels = colours[:, channel].to(torch.int32)
        weights = (centres[:, channel] * (-2 * _INDICES))[:, None]
        keys = weights * levels if keys is None else keys.addcmul_(weights, levels)
    assert keys is not None
    keys += ((centres * centres).sum(1, dtype=torch.int32) * _INDICES + indices)[:, None]
    return (keys.amin(0) & (_INDICES - 1)).masked_fill_(colours[:, 3] < OPAQUE, TRANSPARENT)


def _bayer(height: int, width: int, device: torch.device) -> Tensor:
    """The 4x4 Bayer matrix, 0 to 15, repeated over (height, width): the bits of x^y and y, interleaved from the end."""
    y = torch.arange(height, device=device, dtype=torch.int16)[:, None]
    x = torch.arange(width, device=device, dtype=torch.int16)
    crossed = x ^ y
    return (crossed & 1) * 8 + (y & 1) * 4 + (crossed & 2) + (y >> 1 & 1)


def _through(pixels: Tensor, table: Tensor, name: str) -> Tensor:
    """`table[pixels]`, with an error in words where there is no such row."""
    rows = len(table)
    if pixels.device.type == "cpu" and pixels.numel() and int(pixels.max()) >= rows:  # elsewhere it would be a wait
        raise BadArgument(f"index {int(pixels.max())} in a {name} of {rows} rows", fix=f"indices end at {rows - 1}")
    return table.index_select(0, pixels.flatten().int()).view(*pixels.shape, *table.shape[1:])


def _expect(tensor: Tensor, name: str, shape: str) -> None:
    """A uint8 tensor of a shape that is written like `(n, h, w, 4)`."""
    sizes = shape.strip("()").split(", ")
    fits = tensor.dim() == len(sizes) and (sizes[-1] != "4" or tensor.shape[-1] == 4)
    if tensor.dtype != torch.uint8 or not fits:
        raise BadArgument(f"{name} is {_shape(tensor)}", fix=f"give uint8 {shape}")


def _expect_batch(pixels: Tensor) -> None:
    if pixels.dim() not in (3, 4):
        raise BadArgument(f"pixels is {_shape(pixels)}", fix="give (n, h, w), or (n, h, w, 4) for RGBA")


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
