"""What is known of the values on the simulated device, where nothing is computed: what came from the host."""

from typing import Any

import torch
from torch import Tensor

from hotloop.simulate.operations import facts, named, tensors_in

_LIMIT = 1 << 16  # bytes up to which values that came from the host are kept
_FILLED = 64  # numbers up to which a filled tensor is remembered
_FILLS = {"zeros": 0, "zeros_like": 0, "zero_": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILL_WITH = {"full": 1, "full_like": 1, "fill_": 1, "scalar_tensor": 0, "new_full": 2}  # where the number stands
_KEEP = {"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"}  # nothing is infinite here


class Known:
    """Values of memory that came from the host or was filled with one number, until something is written to it.

    So a label, a seed or the scale of a `GradScaler` that comes back to the host is what it was. They are kept with
    PyTorch's own storages, and go with them.
    """

    everything = False  # whether all values are known

    def arrived(self, tensor: Tensor, values: Tensor) -> None:
        """Values of the host were copied to a tensor."""
        if values.numel() and values.nbytes <= _LIMIT and values.size() == tensor.size():
            self._know(tensor, values.detach().to(tensor.dtype))
        else:
            self._forget(tensor)

    def happened(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation gave a result, or wrote to what it was given."""
        known = facts(func)
        if not known.kernel:
            return
        if known.written and known.name not in _KEEP:
            for name, value in named(func, args, kwargs):
                if name in known.written:
                    for tensor in tensors_in(value):
                        self._forget(tensor)
        if not isinstance(result, Tensor) or result.numel() > _FILLED:
            return
        if known.name in ("_to_copy", "clone"):
            values = self.values(args[0])
            if values is not None:
                self._know(result, values.to(result.dtype))
            return
        place = _FILL_WITH.get(known.name)
        number = _FILLS.get(known.name) if place is None else (args[place] if len(args) > place else None)
        if isinstance(number, int | float):
            like = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device="cpu")
            self._know(result, like.fill_(number))

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

    def _know(self, tensor: Tensor, values: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == values.untyped_storage().nbytes() and values.stride() == tensor.stride():
            storage._hotloop_known = values.clone(memory_format=torch.preserve_format)  # type: ignore[attr-defined]

    def _forget(self, tensor: Tensor) -> None:
        tensor.untyped_storage().__dict__.pop("_hotloop_known", None)
