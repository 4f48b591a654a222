"""`load_weights`: a model with the weights of a run, of one checkpoint, or of a file from elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parameter import is_lazy

from hotloop.checkpoint import Store, load, read_weights
from hotloop.checkpoint.sums import SUMS
from hotloop.errors import BadArgument
from hotloop.step.sharding import sharded
from hotloop.text import printable, shorten

M = TypeVar("M", bound=nn.Module)
WRAPPERS = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before the names of weights


def load_weights(model: M, path: str | Path, which: Literal["last", "best"] = "last") -> M:
    """Give a model the weights of a run, and return it: `model = load_weights(Net(), "runs/a", "best")`.

    `path` is the folder that was given to `fit(save=…)`, one checkpoint in it, or a file of safetensors or of
    `torch.save`. Of a run, `which` says whether the last checkpoint is meant or the best. Weights go where those of the
    model are. What does not fit is refused before anything changes.
    """
    if which not in ("last", "best"):
        raise BadArgument(f"which={which!r}", fix='choose "last" or "best"')
    path = Path(path)
    if not path.exists():
        raise BadArgument(
            f"{printable(str(path))} is not there", fix="name the folder of fit(save=…), or a file of weights"
        )
    held: dict[str, Any] = dict(_of_run(path, which) if path.is_dir() else read_weights(path))
    for prefix in WRAPPERS:
        if not any(name.startswith(prefix) for name in model.state_dict()):
            consume_prefix_in_state_dict_if_present(held, prefix)
    _check(model.state_dict(), held, path)
    model.load_state_dict(sharded(model, held))
    return model


def _of_run(folder: Path, which: str) -> Mapping[str, Any]:
    """The weights in a folder of checkpoints, or in one checkpoint."""
    if (folder / SUMS).is_file():
        tree = load(folder).tree
    else:
        store = Store(folder)
        best = store.best() if which == "best" else None
        found = store.load_latest() if best is None else store.load(best)
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
            fix="hotloop.checkpoint.load(folder).tree has what it holds",
        ) from error
    return weights


def _check(here: Mapping[str, Any], there: Mapping[str, Any], path: Path) -> None:
    """Refuse the weights of another model."""
    mine, theirs = ({name: _shape(value) for name, value in each.items()} for each in (here, there))
    wrong = {
        "missing": [name for name in mine if name not in theirs],
        "not of this model": [name for name in theirs if name not in mine],
        "of another shape": [name for name in mine if mine[name] and name in theirs and mine[name] != theirs[name]],
    }
    if told := [f"{what}: {shorten(names, 3)}" for what, names in wrong.items() if names]:
        raise BadArgument(
            f"the weights in {printable(str(path))} do not fit the model; {'; '.join(told)}",
            fix="build the model as it was; for a part of the weights, model.load_state_dict(…, strict=False)",
        )


def _shape(value: Any) -> str:
    """The shape of a tensor; nothing where the first batch decides it, or where it is something else."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) and not is_lazy(value) else ""
