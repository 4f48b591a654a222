"""`SpriteSet`: sprites as palette indices with their classes, in memory and in one safetensors file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import TensorDataset

from hotloop.errors import BadArgument
from hotloop.printing.text import printable, shorten
from hotloop.records.files import write_whole

SIDE = 16
COLOURS = 16
TRANSPARENT = 0  # index of the pixel that is not there; colours are 1 to 16
FORMAT = "hotloop-sprites"
VERSION = 1


@dataclass(frozen=True)
class SpriteSet:
    """Sprites, their classes and their palette.

    `pixels` is uint8 (sprites, 16, 16): 0 is transparent, 1 to 16 are rows of `palette`, which is uint8 (17, 4) RGBA.
    `labels` is int64 (sprites,): positions in `classes`. `source` says in words where they come from.
    """

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    palette: Tensor
    source: str = ""

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, which: Tensor | slice) -> Self:
        """The same set with some of the sprites: by a slice, an index tensor or a mask."""
        return type(self)(self.pixels[which], self.labels[which], self.classes, self.palette, self.source)

    def of(self, name: str) -> Self:
        """The sprites of one class."""
        return self[self.labels == label_of(name, self.classes)]

    def only(self, names: Sequence[str]) -> Self:
        """The sprites of some classes, which become all the classes that there are."""
        kept = tuple(dict.fromkeys(names))
        new = torch.full((len(self.classes),), -1)
        new[[label_of(name, self.classes) for name in kept]] = torch.arange(len(kept))
        labels = new.to(self.labels.device)[self.labels]
        mine = labels >= 0
        return type(self)(self.pixels[mine], labels[mine], kept, self.palette, self.source)

    def rows(self, columns: int) -> Self:
        """The first few of each class, class after class; a class with fewer is filled up by going round."""
        each = [(self.labels == label).nonzero().flatten() for label in range(len(self.classes))]
        return self[torch.cat([own[torch.arange(columns) % len(own)] for own in each if len(own)])]

    def dataset(self) -> TensorDataset:
        """Pairs (pixels, label) for a DataLoader."""
        return TensorDataset(self.pixels, self.labels)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; it appears whole or not at all."""
        tensors = {
            "pixels": self.pixels.cpu().contiguous(),
            "labels": self.labels.cpu().contiguous(),
            "palette": self.palette.cpu().contiguous(),
        }
        about = {"format": FORMAT, "version": VERSION, "classes": list(self.classes), "source": self.source}
        write_whole(Path(path), save(tensors, metadata={"hotloop": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; anything else is told apart and explained."""
        path = Path(path)
        about, tensors = read_tensors(
            path, [FORMAT], "make one with `hotloop sprites make` or `hotloop sprites import`"
        )
        classes, nothing = about.get("classes"), torch.zeros(0)
        loaded = cls(
            pixels=tensors.get("pixels", nothing),
            labels=tensors.get("labels", nothing),
            classes=tuple(classes) if isinstance(classes, list) else (),
            palette=tensors.get("palette", nothing),
            source=str(about.get("source", "")),
        )
        if not _is_sound(loaded):
            raise BadArgument(
                f"{printable(str(path))} is damaged: its tensors do not fit together", fix="make it again"
            )
        return loaded


def label_of(name: str, classes: Sequence[str]) -> int:
    """The number of a class; an unknown one lists those that there are."""
    if name not in classes:
        known = shorten([printable(known) for known in classes], 40)
        raise BadArgument(f"unknown class '{printable(name)}'", fix=f"choose one of: {known}")
    return list(classes).index(name)


def read_tensors(path: Path, formats: Sequence[str], advice: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and tensors of a safetensors file of hotloop's; never pickle. `advice` says how to get one."""
    name = printable(str(path))
    if not path.is_file():
        raise BadArgument(f"there is no file {name}", fix=advice)
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("hotloop", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise BadArgument(
            f"{name} cannot be read: {printable(str(error))}", fix=f"it may be cut short; {advice}"
        ) from error
    found = about.get("format") if isinstance(about, dict) else None
    if found not in formats:
        kind = printable(str(found)) if found else "tensors without a format of hotloop"
        raise BadArgument(f"{name} holds {kind}, not {' or '.join(formats)}", fix=advice)
    version = about.get("version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise BadArgument(f"{name} was written by a newer hotloop", fix="pip install --upgrade hotloop")
    return about, tensors


def _is_sound(sprites: SpriteSet) -> bool:
    """Whether the parts fit together; in a damaged or hand-made file they may not."""
    count = sprites.labels.numel()
    return (
        sprites.pixels.shape == (count, SIDE, SIDE)
        and sprites.pixels.dtype == torch.uint8
        and sprites.labels.shape == (count,)
        and sprites.labels.dtype == torch.int64
        and sprites.palette.shape == (COLOURS + 1, 4)
        and sprites.palette.dtype == torch.uint8
        and all(isinstance(name, str) for name in sprites.classes)
        and (count == 0 or int(sprites.pixels.max()) <= COLOURS)
        and (count == 0 or (int(sprites.labels.min()) >= 0 and int(sprites.labels.max()) < len(sprites.classes)))
    )
