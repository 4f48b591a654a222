"""What a simulated script saves is kept aside and read from there: no checkpoint of the person's gets made-up numbers.

Nothing that is kept has a name on the disk, so that whatever does not know of it fails and can do no harm.
"""

import copy
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from hotloop._torch import leaves_of
from hotloop.simulate._torch import is_simulated, storage_id
from hotloop.simulate.crossing import TO_HOST
from hotloop.simulate.dispatch import SimulatedGpu
from hotloop.simulate.events import Place
from hotloop.simulate.patches import Patches
from hotloop.simulate.places import here


class SavedFile:
    """What was saved: a file without a name, or an object with what it has on the device, and a file of its size."""

    def __init__(self, obj: Any = None, sketches: Iterable[Tensor] = ()) -> None:
        self.obj = obj
        self.sketches = frozenset(map(id, sketches))  # which of its tensors stand for some on the device
        descriptor, name = tempfile.mkstemp()
        self.path = f"/proc/self/fd/{descriptor}"
        Path(name).unlink()
        weakref.finalize(self, os.close, descriptor)


class SavedFiles:
    """Keeps what goes to a path through `torch.save` and safetensors, and answers for it as the disk would."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._kept: dict[str, SavedFile] = {}  # by path
        self.written: dict[Place, str] = {}  # lines that saved to a file which the script had opened, by its name

    def install(self, patches: Patches) -> None:
        self._torch(patches)
        self._safetensors(patches)
        self._moves(patches)

    def of(self, path: Any) -> SavedFile | None:
        """What was saved to a path, if something was."""
        return self._kept.get(_key(path)) if self._kept and isinstance(path, str | bytes | os.PathLike) else None

    def _torch(self, patches: Patches) -> None:
        save, load = torch.save, torch.load

        def keep(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            held = [tensor for tensor in tensors_held(obj) if is_simulated(tensor)]
            if not isinstance(f, str | os.PathLike):
                self._writes(f)
                known = {id(t): self._gpu.values.tensor(t) for t in held}
                save(copy.deepcopy(obj, known) if held else obj, f, *args, **kwargs)
            elif held:
                self._kept[_key(f)] = self._sketched(obj, held)
            else:
                kept = SavedFile()
                save(obj, kept.path, *args, **kwargs)
                self._kept[_key(f)] = kept
            for tensor in held:
                self._gpu.teller.copied(tensor.nbytes, TO_HOST, pinned=False, blocking=True, place=here())

        def fetch(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            there = torch.device(map_location) if isinstance(map_location, str | torch.device) else None
            to, cuda = (there.type if there else None), (there if there and there.type == "cuda" else "cuda")
            kept = self.of(f)
            if kept is not None and kept.sketches:
                goes = "cpu" if to == "cpu" else cuda
                drawn = {id(t): _like(t, _drawn(t, goes)) for t in tensors_held(kept.obj) if id(t) in kept.sketches}
                return copy.deepcopy(kept.obj, drawn)
            moved: set[int] = set()

            def stay(storage: Any, location: str) -> Any:
                if to == "cuda" or (to is None and map_location is None and location.startswith("cuda")):
                    moved.add(storage_id(storage))
                    return storage
                return storage if to == "cpu" or not callable(map_location) else map_location(storage, location)

            place = stay if not isinstance(map_location, dict) else map_location
            found = load(f if kept is None else kept.path, place, *args, **kwargs)
            gone = [t for t in tensors_held(found) if storage_id(t) in moved]
            return copy.deepcopy(found, {id(t): _like(t, t.to(cuda)) for t in gone}) if gone else found

        for module in (torch, torch.serialization):
            patches.set(module, "save", keep)
            patches.set(module, "load", fetch)

    def _sketched(self, obj: Any, held: list[Tensor]) -> SavedFile:
        sketches = {id(t): _like(t, self._sketch(t)) for t in held}
        kept = SavedFile(copy.deepcopy(obj, dict(sketches)), sketches.values())
        os.truncate(kept.path, sum(tensor.nbytes for tensor in held))
        return kept

    def _sketch(self, tensor: Tensor) -> Tensor:
        """A tensor of the device in a file that was not written: what it holds, or its shape alone."""
        if self._gpu.known.everything:
            return self._gpu.values.tensor(tensor)
        return torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")

    def _writes(self, opened: Any) -> None:
        """A file that the script opened is truncated before anyone is asked."""
        place = here()
        if isinstance(getattr(opened, "name", None), str) and place is not None:
            self.written[place] = opened.name

    def _safetensors(self, patches: Patches) -> None:
        """Below `save_file` and `load_file`, which a program may have imported before."""
        serialize, safe_open, address = safetensors.serialize, safetensors.safe_open, safetensors.torch.storage_ptr

        def keep(tensors: Any, filename: Any, metadata: Any = None) -> None:
            kept = SavedFile()
            Path(kept.path).write_bytes(serialize(tensors, metadata))
            self._kept[_key(filename)] = kept

        def opened(filename: Any, *args: Any, **kwargs: Any) -> Any:
            kept = self.of(filename)
            return safe_open(filename if kept is None else kept.path, *args, **kwargs)

        def told(tensor: Tensor) -> int:
            return storage_id(tensor) if is_simulated(tensor) else address(tensor)

        patches.set(safetensors.torch, "storage_ptr", told)  # by which it sees tensors that share memory
        for module in (safetensors, safetensors.torch):
            patches.set(module, "serialize_file", keep)
            patches.set(module, "safe_open", opened)

    def _moves(self, patches: Patches) -> None:
        """What scripts do with a checkpoint once it is saved: ask for it, copy it, rename it, delete it."""
        stat, copyfile = os.stat, shutil.copyfile

        def asked(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            kept = self.of(path) if kwargs.get("dir_fd") is None and kwargs.get("follow_symlinks", True) else None
            return stat(path if kept is None else kept.path, *args, **kwargs)

        def copied(src: Any, dst: Any, **kwargs: Any) -> Any:
            kept = self.of(src)
            if kept is None:
                self._kept.pop(_key(dst), None)
                return copyfile(src, dst, **kwargs)
            self._kept[_key(dst)] = kept
            return dst

        patches.set(os, "stat", asked)
        patches.set(shutil, "copyfile", copied)
        for module, name, wrapper in (
            *((os, name, self._moving) for name in ("rename", "replace")),
            *((os, name, self._removing) for name in ("remove", "unlink")),
            *((shutil, name, self._dressing) for name in ("copymode", "copystat")),
        ):
            patches.set(module, name, wrapper(getattr(module, name)))

    def _moving(self, move: Callable[..., None]) -> Callable[..., None]:
        def moved(src: Any, dst: Any, **kwargs: Any) -> None:
            old, new = _key(src), _key(dst)
            if kwargs or old not in self._kept:
                move(src, dst, **kwargs)
                self._kept.pop(new, None)
            for path in [path for path in self._kept if path == old or path.startswith(f"{old}/")]:
                self._kept[new + path.removeprefix(old)] = self._kept.pop(path)

        return moved

    def _removing(self, remove: Callable[..., None]) -> Callable[..., None]:
        def removed(path: Any, **kwargs: Any) -> None:
            if kwargs or self.of(path) is None or os.path.islink(path):  # noqa: PTH114  # it may be bytes
                remove(path, **kwargs)
            else:
                del self._kept[_key(path)]

        return removed

    def _dressing(self, dress: Callable[..., None]) -> Callable[..., None]:
        def dressed(src: Any, dst: Any, **kwargs: Any) -> None:
            if self.of(src) is None:
                dress(src, dst, **kwargs)

        return dressed


def _key(path: Any) -> str:
    return os.path.realpath(os.fsdecode(path))


def tensors_held(obj: Any) -> Iterator[Tensor]:
    """Every tensor that an object would be saved with."""
    for leaf in leaves_of(obj):
        if isinstance(leaf, nn.Module):
            yield from (*leaf.parameters(), *leaf.buffers())
        elif isinstance(leaf, Tensor):
            yield leaf


def _like(tensor: Tensor, made: Tensor) -> Tensor:
    """`made` as a parameter, where the other is one."""
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _drawn(sketch: Tensor, device: str | torch.device) -> Tensor:
    if sketch.is_meta:
        return torch.zeros(sketch.size(), dtype=sketch.dtype, device=device)
    return sketch.detach().clone().to(device)
