"""What a simulated script saves is kept aside: no checkpoint of the person's gets made-up numbers."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hotloop.apps.simulate._torch import is_simulated, storage_id
from hotloop.apps.simulate.crossing import TO_HOST
from hotloop.apps.simulate.dispatch import SimulatedGpu
from hotloop.placement.sites import Site, user_site
from hotloop.scripts.kept_files import Replace, SavedFile, SavedFiles
from hotloop.values.tree import leaves


class SketchedFile(SavedFile):
    """An object that was saved with tensors of the device, and a file of its size."""

    def __init__(self, obj: Any, sketches: Iterable[Tensor]) -> None:
        super().__init__()
        self.obj = obj
        self.sketches = frozenset(map(id, sketches))  # which of its tensors stand for some on the device


class SimulatedFiles(SavedFiles):
    """Keeps what goes to a path through `torch.save` and safetensors, also from the simulated device."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self.written: dict[Site, str] = {}  # lines that saved to a file which the script had opened, by its name

    def saving(self, save: Callable[..., None]) -> Callable[..., None]:
        save_plain = super().saving(save)

        def keep(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            held = [tensor for tensor in tensors_held(obj) if is_simulated(tensor)]
            if not isinstance(f, str | os.PathLike):
                self._writes(f)
                known = {id(t): self._gpu.values.tensor(t) for t in held}
                save(copy.deepcopy(obj, known) if held else obj, f, *args, **kwargs)
            elif held:
                self._keep(f, self._sketched(obj, held))
            else:
                save_plain(obj, f, *args, **kwargs)
            for tensor in held:
                self._gpu.teller.copied(tensor.nbytes, TO_HOST, pinned=False, blocking=True, place=user_site())

        return keep

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            there = torch.device(map_location) if isinstance(map_location, str | torch.device) else None
            to, cuda = (there.type if there else None), (there if there and there.type == "cuda" else "cuda")
            kept = self.of(f)
            if isinstance(kept, SketchedFile):
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

        return fetch

    def _sketched(self, obj: Any, held: list[Tensor]) -> SketchedFile:
        sketches = {id(t): _like(t, self._sketch(t)) for t in held}
        kept = SketchedFile(copy.deepcopy(obj, dict(sketches)), sketches.values())
        os.truncate(kept.path, sum(tensor.nbytes for tensor in held))
        return kept

    def _sketch(self, tensor: Tensor) -> Tensor:
        """A tensor of the device in a file that was not written: what it holds, or its shape alone."""
        if self._gpu.known.everything:
            return self._gpu.values.tensor(tensor)
        return torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")

    def _writes(self, opened: Any) -> None:
        """A file that the script opened is truncated before anyone is asked."""
        place = user_site()
        if isinstance(getattr(opened, "name", None), str) and place is not None:
            self.written[place] = opened.name

    def safetensors_saving(self, replace: Replace) -> None:
        super().safetensors_saving(replace)
        address = safetensors.torch.storage_ptr

        def told(tensor: Tensor) -> int:
            return storage_id(tensor) if is_simulated(tensor) else address(tensor)

        replace(safetensors.torch, "storage_ptr", told)  # by which it sees tensors that share memory


def tensors_held(obj: Any) -> Iterator[Tensor]:
    """Every tensor that an object would be saved with."""
    for leaf in leaves(obj):
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
