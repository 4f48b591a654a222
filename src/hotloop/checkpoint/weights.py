"""Weights in one file: those from elsewhere, read without running anything in them; those of a checkpoint, written."""

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.checkpoint.reader import Checkpoint, load
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.sums import SUMS
from hotloop.checkpoint.tensorfile import DTYPE_NAMES, HostSource, write_tensors
from hotloop.errors import BadArgument
from hotloop.printing.text import an, printable, shorten
from hotloop.records.files import whole

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
INNER = ("model", "state_dict")  # under which training scripts keep the weights
_SAVE = "save the weights alone: torch.save(model.state_dict(), path), or safetensors.torch.save_file"
_BEGINNINGS = {  # what people give by mistake
    b"\x89HDF": "an HDF5 file, perhaps of Keras",
    b"version https://git-lfs": "a pointer of Git LFS in place of the file (`git lfs pull` fetches it)",
    b"<": "a web page in place of the file",
    b"{": "JSON",
}


class Weights(dict[str, Tensor]):
    """Tensors by name, as `load_state_dict` takes them. `key` says under which name the file had them."""

    key: str | None = None  # None where they were all that it had


def read_weights(path: str | Path) -> Weights:
    """Read the weights in a file of safetensors or of `torch.save`; all tensors are on the CPU, in memory of their own.

    A file that holds more, such as an optimizer, must have the weights under "model" or "state_dict"; the `key` of the
    result says which was taken. A pickle that wants to do more than name tensors is refused, and nothing in it is run.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == "safetensors":
        held: Any = _read_safetensors(path)
    elif path.suffix == ".safetensors":
        raise _error(
            path, "has the name of a safetensors file, but is a pickle, and could run code", "rename it if you trust it"
        )
    else:
        held = _read_pickle(path)
    return _weights_in(path, held)


def export_weights(checkpoint: str | Path, file: str | Path, *, best: bool = False) -> Path:
    """Write the model in a checkpoint as one safetensors file, sharded over ranks or not; the checkpoint that it was.

    `checkpoint` is the folder of one, or of a run: then the latest is taken, or the `best`. All of it is read and
    verified; no more than one process is needed.

        export_weights("runs/a", "model.safetensors")
        model.load_state_dict(read_weights("model.safetensors"))
    """
    folder, file = Path(checkpoint), Path(file)
    if (folder / SUMS).is_file():
        found: Checkpoint | None = load(folder)
    else:
        found = Store(folder).load_best() if best else Store(folder).load_latest()
    if found is None:
        what = f"holds no checkpoint{' with a score' if best else ''}" if folder.exists() else "is not there"
        fix = "take the latest, or save with validate=" if best else "name the folder of a run that was saved"
        raise _error(folder, what, fix)
    held = found.tree.get("loop", found.tree) if isinstance(found.tree, Mapping) else None
    model = held.get("model") if isinstance(held, Mapping) else None
    if not isinstance(model, Mapping):
        raise _error(found.path, "is not a checkpoint of a model", "name one that `fit(save=…)` has written")
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor) and value.dtype in DTYPE_NAMES}
    if others := [name for name in model if name not in tensors]:
        words = f"not written, since safetensors files hold no such values: {printable(shorten(others, 6))}"
        warnings.warn(CheckpointWarning(words), stacklevel=2)
    with whole(file) as sink:
        write_tensors(sink, [HostSource(tensors)], {"format": "pt"})
    return found.path


def _kind(path: Path) -> str:
    """The kind of a file by how it begins: safetensors or pickle; anything else is refused."""
    try:
        if path.is_dir():
            raise _folder_error(path)
        if not path.is_file():
            raise _error(path, "is not there" if not path.exists() else "is not a file", "name a file of weights")
        length = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(32)
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror or error}", "name a readable file") from error
    if not head:
        raise _error(path, "is empty", "it was perhaps not downloaded or saved to the end; get it again")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= length - 8:
        return "safetensors"
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return "pickle"
    for beginning, name in _BEGINNINGS.items():
        if head.startswith(beginning):
            raise _error(path, f"holds no weights: it is {name}", "name a .safetensors file or one of torch.save")
    raise _error(
        path, "holds no weights that can be read: it is cut short, or of another kind", "name a .safetensors file"
    )


def _folder_error(path: Path) -> BadArgument:
    if (path / SUMS).is_file():
        return _error(
            path,
            "is a checkpoint of hotloop",
            "hotloop.checkpoint.reader.load reads it; `hotloop export` writes its weights",
        )
    files = sorted(each.name for each in path.iterdir() if each.suffix in SUFFIXES)
    if not files:
        kinds = ", ".join(SUFFIXES)
        return _error(path, "is a folder without a file of weights", f"name a file that ends in {kinds}")
    listed = printable(shorten(files))
    return _error(path, f"is a folder, with {listed}", f"name one file: {printable(str(path / files[0]))}")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        # Copies: what `load_file` gives is the file in memory, and whoever writes to that file again ends the process.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise _error(path, f"is damaged: {error}", "it may be cut short; get it again") from error


def _read_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols; the error says it better
            return torch.load(path, map_location="cpu", weights_only=True, mmap=False)  # see _read_safetensors
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        load = f"it wants to load {wanted[1][:80]}" if wanted else "torch.load(weights_only=True) refuses it"
        raise _error(
            path,
            f"is a pickle of more than weights: {load}, and loading that would run code from the file",
            f"where the model was made, {_SAVE}",
        ) from error
    except Exception as error:  # a damaged pickle can fail in any way
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise _error(path, f"cannot be read as weights: {first[:300]}", f"get it again, or {_SAVE}") from error


def _weights_in(path: Path, held: Any) -> Weights:
    """The state dict in what a file held: all of it, or what is under one of the usual names."""
    if _is_weights(held):
        return Weights({name: tensor.detach() for name, tensor in held.items()})
    if not isinstance(held, Mapping):
        raise _error(path, f"holds {an(type(held).__name__)}, not tensors by name", _SAVE)
    for key in INNER:
        if _is_weights(held.get(key)):
            weights = Weights({name: tensor.detach() for name, tensor in held[key].items()})
            weights.key = key
            return weights
    if not held:
        raise _error(path, "holds no tensors at all", _SAVE)
    others = [f"{key} ({type(each).__name__})" for key, each in held.items() if not isinstance(each, Tensor)]
    raise _error(path, f"holds more than tensors: {shorten(others, 6)}", f"{_SAVE}, or keep them under 'model'")


def _is_weights(held: Any) -> bool:
    return (
        isinstance(held, Mapping)
        and len(held) > 0
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in held.items())
    )


def _error(path: Path, what: str, fix: str) -> BadArgument:
    return BadArgument(f"{printable(str(path))} {printable(what)}", fix=fix)
