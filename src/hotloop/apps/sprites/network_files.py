"""Trained networks as files: tensors and JSON in one safetensors file, never pickle."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from hotloop.apps.sprites.dataset import COLOURS, VERSION, SpriteSet, read_tensors
from hotloop.apps.sprites.models import WIDEST, Classifier, Drawer, Size
from hotloop.errors import BadArgument
from hotloop.printing.text import printable, shorten
from hotloop.records.files import write_whole

Kind = Literal["classifier", "drawer"]
NETWORKS: dict[str, type[Classifier] | type[Drawer]] = {"classifier": Classifier, "drawer": Drawer}
VERBS: dict[Kind, str] = {"classifier": "train", "drawer": "draw"}


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network, the classes that it knows, and the palette of the sprites that it learned from."""

    kind: Kind
    model: nn.Module
    classes: tuple[str, ...]
    palette: Tensor
    learned_from: str = ""

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; it appears whole or not at all."""
        write_whole(Path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """The content of such a file."""
        size = getattr(self.model, "size")  # noqa: B009  # every network of this package has one
        about = {
            "format": f"hotloop-{self.kind}",
            "version": VERSION,
            "size": size.to_json(),
            "classes": list(self.classes),
            "learned_from": self.learned_from,
        }
        weights = {f"model.{name}": t.detach().cpu().contiguous() for name, t in self.model.state_dict().items()}
        return save({**weights, "palette": self.palette.cpu()}, metadata={"hotloop": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path, *kinds: Kind, device: str | torch.device = "cpu") -> "TrainedNetwork":
        """Read what `save` wrote; `kinds` are those that will do, or else any."""
        path, kinds = Path(path), kinds or ("classifier", "drawer")
        advice = " or ".join(f"`hotloop sprites {VERBS[kind]}`" for kind in kinds) + " makes such a file"
        about, tensors = read_tensors(path, [f"hotloop-{kind}" for kind in kinds], advice)
        kind: Kind = about["format"].removeprefix("hotloop-")
        palette = tensors.pop("palette", torch.zeros(0))
        try:
            size, names = Size.from_json(about["size"]), about["classes"]
            classes = tuple(names) if isinstance(names, list) else ()
            _check(size, classes, palette)
            model = NETWORKS[kind](size)
            model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            first = printable((str(error) or type(error).__name__).splitlines()[0])
            raise BadArgument(f"{printable(str(path))} is damaged: {first}", fix=advice) from error
        return cls(kind, model.to(device).eval(), classes, palette, str(about.get("learned_from", "")))

    def must_know(self, sprites: SpriteSet, name: str) -> None:
        """Refuse sprites of other classes than those that were learned."""
        if self.classes != sprites.classes:
            known, given = shorten(list(self.classes), 20), shorten(list(sprites.classes), 20)
            raise BadArgument(
                f"the model knows other classes ({known}) than {printable(name)} has ({given})",
                fix=f"train on that set: hotloop sprites {VERBS[self.kind]} {shlex.quote(printable(name))}",
            )


def _check(size: Size, classes: tuple[object, ...], palette: Tensor) -> None:
    """Hold what a file says against what it has, before a network as large as it says is built."""
    if not (size.is_sound() and 0 < size.width <= WIDEST and size.classes == len(classes)):
        raise ValueError("its size and its classes do not fit together")
    if not all(isinstance(name, str) for name in classes):
        raise ValueError("a class without a name")
    if palette.shape != (COLOURS + 1, 4) or palette.dtype != torch.uint8:
        raise ValueError("its palette is none")
