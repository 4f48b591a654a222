"""Lazy modules: what has no shape yet stays on the host, and comes to the device once it has one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin, is_lazy  # type: ignore[attr-defined]

from hotloop.simulate.operations import is_simulated
from hotloop.simulate.patches import Patches

if TYPE_CHECKING:
    from hotloop.simulate.dispatch import SimulatedGpu


class Lazies:
    """Parameters and buffers of `nn.LazyLinear` and its like."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu = gpu

    def install(self, patches: Patches) -> None:
        materialize, swap = UninitializedTensorMixin.materialize, torch.utils.swap_tensors

        def made(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
            goes = vars(tensor).pop("_hotloop_goes", None)  # as which type
            materialize(tensor, shape, None if goes else device, dtype or goes)
            if goes is not None:
                with self._silently():
                    there = tensor.detach().to("cuda")
                if isinstance(tensor, nn.Parameter):
                    there = nn.Parameter(there, tensor.requires_grad)
                self._gpu.fake.fake_tensor_converter.meta_converter.tensor_memo.clear()  # weak references forbid a swap
                swap(tensor, there)  # type: ignore[no-untyped-call]  # not put back later: only there it has values

        patches.set(UninitializedTensorMixin, "materialize", made)

    @contextmanager
    def held_back(self, module: nn.Module, fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """While a module is moved, what has no shape yet is not; it is noted where it goes."""
        held = [
            (tensors, name, tensor)
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None and is_lazy(tensor)
        ]
        for tensors, name, _ in held:
            tensors[name] = None
        try:
            yield
        finally:
            for tensors, name, tensor in held:
                tensors[name] = tensor  # type: ignore[assignment]
        for _, _, tensor in held:
            with self._silently():
                moved = fn(torch.empty(0, device="cpu"))
            if is_simulated(moved):
                tensor._hotloop_goes = moved.dtype  # type: ignore[union-attr]

    @contextmanager
    def _silently(self) -> Iterator[None]:
        self._gpu.silent += 1
        try:
            yield
        finally:
            self._gpu.silent -= 1
