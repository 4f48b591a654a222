"""`load_weights`: loads the weights of a run, of a checkpoint or of a file into a model."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotloop.checkpoint.reader import load
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.sums import SUMS
from hotloop.checkpoint.weights import read_weights
from hotloop.errors import BadArgument
from hotloop.printing.text import an, printable, shorten
from hotloop.step.sharding import sharded

M = TypeVar("M", bound=nn.Module)
COMPILED = "_orig_mod."  # what torch.compile puts into the names of weights, in whichever place
WRAPPED = "module."  # what DataParallel and AveragedModel put before all of them
COUNTER = "n_averaged"  # of an AveragedModel


def load_weights(model: M, path: str | Path, which: Literal["last", "best"] = "last") -> M:
    """Give a model the weights of a run, and return it: `model = load_weights(Net(), "runs/a", "best")`.

    `path` is the folder that was given to `fit(save=…)`, one checkpoint in it, or a file of safetensors or of
    `torch.save`. Of a run, `which` says whether the last checkpoint is meant or the best. Weights go where those of the
    model are; whether it, or the one that was saved, is compiled or in a DataParallel makes no difference. What does
    not fit is refused before anything changes.
    """
    if which not in ("last", "best"):
        raise BadArgument(f"which={which!r}", fix='choose "last" or "best"')
    if not isinstance(model, nn.Module):
        raise BadArgument(
            f"the model is {an(type(model).__name__)}", fix='it comes first: load_weights(model, "runs/a")'
        )
    path = Path(path)
    if not path.exists():
        raise BadArgument(
            f"{printable(str(path))} is not there", fix="name the folder of fit(save=…), or a file of weights"
        )
    here = model.state_dict(keep_vars=True)  # in which tied weights are one object
    if unmade := [name for name, value in here.items() if isinstance(value, Tensor) and value.is_meta]:
        raise BadArgument(
            f"the model has no memory for its weights: {shorten(unmade)} on the meta device",
            fix='model.to_empty(device="cpu") before',
        )
    held = _renamed(here, _of_run(path, which) if path.is_dir() else read_weights(path))
    wrong = _mismatch(here, held)
    if wrong and not _is_taken(model, held):
        raise BadArgument(
            f"the weights in {printable(str(path))} do not fit the model; {wrong}",
            fix="build the model as it was; for a part of the weights, model.load_state_dict(…, strict=False)",
        )
    model.load_state_dict(sharded(model, held))
    return model


def _renamed(here: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by the model's names, without the prefixes of wrappers on either side."""
    if here.keys() == held.keys():
        return dict(held)
    own = {plain: name for name, plain in _unwrapped(here).items()}
    found = {own.get(plain, plain): held[name] for name, plain in _unwrapped(held).items()}
    for tied in _tied(here):  # of which safetensors keeps one
        known = next((name for name in tied if name in found), None)
        if known is not None:
            found |= {name: found[known] for name in tied if name not in found}
    return found


def _unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Each name, and its form without the prefix of `torch.compile`, DataParallel or AveragedModel."""
    plain = {name: name.replace(COMPILED, "") for name in names}
    while plain and all(short.startswith(WRAPPED) for name, short in plain.items() if name != COUNTER):
        plain = {name: short.removeprefix(WRAPPED) for name, short in plain.items() if name != COUNTER}
    return plain


def _tied(here: Mapping[str, Any]) -> list[list[str]]:
    """The names of each tied weight."""
    names: dict[int, list[str]] = {}
    for name, value in here.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _is_taken(model: nn.Module, held: Mapping[str, Any]) -> bool:
    """Whether the modules' own hooks load weights of other names or shapes, such as those of an older version."""
    try:
        copy.deepcopy(model).load_state_dict(held)
    except Exception:  # noqa: BLE001  # whatever hooks of modules raise
        return False
    return True


def _of_run(folder: Path, which: str) -> Mapping[str, Any]:
    """The weights in a folder of checkpoints, or in one checkpoint."""
    if (folder / SUMS).is_file():
        tree = load(folder).tree
    else:
        store = Store(folder)
        best = store.load_best() if which == "best" else None
        found = best or store.load_latest()
        if found is None:
            raise BadArgument(
                f"{printable(str(folder))} holds no checkpoint",
                fix="name the folder of fit(save=…), or a file of weights",
            )
        if which == "best" and best is None:
            raise BadArgument(
                f"no checkpoint in {printable(str(folder))} is the best: the run has evaluated nothing",
                fix=f'train with fit(…, validate=val_loader), or take the last one, of step {found.step}: "last"',
            )
        tree = found.tree
    try:
        weights: Mapping[str, Any] = tree["loop"]["model"]
    except (KeyError, TypeError, IndexError) as error:
        raise BadArgument(
            f"the checkpoint in {printable(str(folder))} is not one of Loop.fit",
            fix="hotloop.checkpoint.reader.load(folder).tree has what it holds",
        ) from error
    return weights


def _mismatch(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """How names and shapes of weights differ from the model's, in words; empty where they agree."""
    mine, theirs = ({name: _shape(value) for name, value in each.items()} for each in (here, there))
    wrong = {
        "missing": [name for name in mine if name not in theirs],
        "not of this model": [name for name in theirs if name not in mine],
        "of another shape": [name for name in mine if mine[name] and name in theirs and mine[name] != theirs[name]],
    }
    return "; ".join(f"{what}: {shorten(names, 3)}" for what, names in wrong.items() if names)


def _shape(value: Any) -> str:
    """The shape of a tensor as text; empty for lazy parameters and other values."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) and not is_lazy(value) else ""
