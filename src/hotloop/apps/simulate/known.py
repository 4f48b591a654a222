"""What is known of the values on the simulated device: what came from the host, and what follows from it alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotloop.apps.simulate._torch import is_simulated, without_functions
from hotloop.apps.simulate.operations import facts, named, on_device
from hotloop.values.tree import map_tensors, tensors_of

_NUMBERS, _LABELS = 1 << 16, 1 << 22  # bytes up to which values are kept: of real numbers, and of integers and truths
_OVERWRITE = {"zero_", "fill_", "copy_"}  # whatever was there before
_KEEP = {"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"}  # nothing is infinite here


class Known:
    """Values of memory that came from the host, or that an operation makes from values that are known.

    So a label, a seed or the scale of a `GradScaler` is what it was, and so are the largest label and a mask of the
    padding. They are kept with PyTorch's own storages, and go with them.
    """

    everything = False  # whether all values are known
    captured: list[Callable[[], None]] | None = None  # what a replay has to compute, while a CUDA graph is captured

    def arrived(self, tensor: Tensor, values: Tensor) -> None:
        """Values of the host were copied to a tensor."""
        if not values.numel():  # nothing was written: what was known stays known
            return
        if _is_small(tensor):
            self._know(tensor, values.detach())
        else:
            self._forget(tensor)

    def happened(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation gave a result, or wrote to what it was given."""
        known = facts(func)
        if not known.kernel or known.name in _KEEP:
            return
        written = [t for name, value in named(func, args, kwargs) if name in known.written for t in tensors_of(value)]
        computed = self._following(func, args, kwargs, written, result)
        for tensor in written if computed is None else ():
            self._forget(tensor)
        for tensor, values in computed or ():
            self._know(tensor, values)

    def values(self, tensor: Tensor) -> Tensor | None:
        """What a tensor holds, where that is known."""
        whole = getattr(tensor.untyped_storage(), "_hotloop_known", None)
        if whole is None or whole.dtype != tensor.dtype:
            return None
        found: Tensor = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return found

    def notes(self) -> list[str]:
        """What could not be known, in sentences."""
        return []

    def _following(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], result: Any
    ) -> list[tuple[Tensor, Tensor]] | None:
        """What an operation writes and gives, by its own kernel on the host; None where not all that it reads is known.

        Random numbers are the device's.
        """
        name = facts(func).name
        made = [tensor for tensor in tensors_of(result) if is_simulated(tensor)]
        small = all(map(_is_small, (*made, *written)))
        if not small or not facts(func).determined or not (made or written):
            return None
        operands: dict[int, Tensor] = {}
        for tensor in tensors_of((args, kwargs)):
            values = self.values(tensor) if is_simulated(tensor) else tensor
            if values is None and name in _OVERWRITE and tensor is args[0]:
                values = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu")
            if values is None:
                return None
            operands[id(tensor)] = values
        operands |= {id(tensor): operands[id(tensor)].clone() for tensor in written}
        given = {**kwargs, "device": torch.device("cpu")} if on_device(kwargs.get("device")) else kwargs
        try:
            with without_functions():
                arguments = map_tensors((args, list(given.values())), lambda tensor: operands[id(tensor)])
                found = func(*arguments[0], **dict(zip(given, arguments[1], strict=True)))
        except (RuntimeError, IndexError):  # the host has no kernel for it
            return None
        new = zip(made, tensors_of(found), strict=False)
        return [
            *((tensor, operands[id(tensor)]) for tensor in written),
            *((tensor, values) for tensor, values in new if tensor.size() == values.size()),
        ]

    def _know(self, tensor: Tensor, values: Tensor) -> None:
        """Values become those of a tensor, which may be a window on memory of which more is known."""
        window, storage = self.values(tensor), tensor.untyped_storage()
        whole = tensor.numel() * tensor.dtype.itemsize == storage.nbytes() and not tensor.storage_offset()
        if window is None and not whole:
            self._forget(tensor)
            return
        with without_functions(), torch.inference_mode(False):
            if window is None:
                window = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
                storage._hotloop_known = window  # type: ignore[attr-defined]
            window.copy_(values)

    def _forget(self, tensor: Tensor) -> None:
        tensor.untyped_storage().__dict__.pop("_hotloop_known", None)


def _is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= (_NUMBERS if tensor.dtype.is_floating_point else _LABELS)
