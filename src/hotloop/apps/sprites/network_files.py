"""Trained networks as files: tensors and JSON in one safetensors file, never pickle."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from hotloop.apps.sprites.dataset import COLOURS, VERSION, SpriteSet, format_of, read_tensors
from hotloop.apps.sprites.models import Classifier, Drawer, Size, cost_of
from hotloop.errors import BadArgument
from hotloop.files.whole import write_whole
from hotloop.printing.text import printable, shorten

Kind = Literal["classifier", "drawer"]
NETWORKS: dict[str, type[Classifier] | type[Drawer]] = {"classifier": Classifier, "drawer": Drawer}
ADVICE = {"classifier": "`hotloop sprites train` makes one", "drawer": "`hotloop sprites draw` makes one"}


def kind_of(path: str | Path) -> Kind:
    """Whether a file holds a classifier or a drawer."""
    kinds: tuple[Kind, ...] = ("classifier", "drawer")
    found = format_of(Path(path), "`hotloop sprites train` and `hotloop sprites draw` make networks")
    for kind in kinds:
        if found == f"hotloop-{kind}":
            return kind
    raise BadArgument(
        f"{printable(str(path))} holds {printable(found)}, not a network", fix="`hotloop sprites train` makes one"
    )


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
    def load(cls, path: str | Path, kind: Kind, device: str | torch.device = "cpu") -> "TrainedNetwork":
        """Read what `save` wrote."""
        path = Path(path)
        about, tensors = read_tensors(path, f"hotloop-{kind}", ADVICE[kind])
        palette = tensors.pop("palette", torch.zeros(0))
        try:
            size, names = Size.from_json(about["size"]), about["classes"]
            classes = tuple(names) if isinstance(names, list) else ()
            _check(kind, size, classes, palette, tensors)
            model = NETWORKS[kind](size)
            model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            first = printable((str(error) or type(error).__name__).splitlines()[0])
            raise BadArgument(f"{printable(str(path))} is damaged: {first}", fix=ADVICE[kind]) from error
        return cls(kind, model.to(device).eval(), classes, palette, str(about.get("learned_from", "")))

    def must_know(self, sprites: SpriteSet, name: str) -> None:
        """Refuse sprites of other classes than those that were learned."""
        if self.classes != sprites.classes:
            known, given = shorten(list(self.classes), 20), shorten(list(sprites.classes), 20)
            verb = "train" if self.kind == "classifier" else "draw"
            raise BadArgument(
                f"the model knows other classes ({known}) than {printable(name)} has ({given})",
                fix=f"train on that set: hotloop sprites {verb} {shlex.quote(printable(name))}",
            )


def _check(kind: Kind, size: Size, classes: tuple[object, ...], palette: Tensor, weights: dict[str, Tensor]) -> None:
    """Hold what a file says against what it has, before a network as large as it says is built."""
    if not (size.is_sound() and size.width > 0 and 0 < size.classes == len(classes)):
        raise ValueError("its size and its classes do not fit together")
    if not all(isinstance(name, str) for name in classes):
        raise ValueError("a class without a name")
    if palette.shape != (COLOURS + 1, 4) or palette.dtype != torch.uint8:
        raise ValueError("its palette is none")
    if cost_of(NETWORKS[kind], size).weights != sum(tensor.numel() for tensor in weights.values()):
        raise ValueError(f"it has not the weights of a network of width {size.width}")
