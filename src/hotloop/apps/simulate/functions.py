"""Operands on different devices are repaired where autograd still sees it, so that all bugs are found in one run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from hotloop.apps.simulate._torch import is_simulated
from hotloop.apps.simulate.dispatch import HOME, Mixed, SimulatedGpu
from hotloop.placement.golden import operands_of
from hotloop.values.tree import map_tensors


class Repairs(TorchFunctionMode):
    """Lets the device refuse a call, says why, and calls again with what was on the host moved."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._gpu.guarded += 1
        try:
            return func(*args, **kwargs)
        except Mixed as refused:
            written = refused.written
        except NotImplementedError:  # numbers of the device in a list are read below where anyone is asked
            if func is not torch.tensor:
                raise
            read = map_tensors(args, lambda tensor: tensor.item() if is_simulated(tensor) else tensor)
            return func(*read, **kwargs)
        finally:
            self._gpu.guarded -= 1
        operands = list(operands_of(func, args, kwargs))
        strangers = [(n, t) for n, t in operands if not is_simulated(t) and t.dim()] or operands[:1]
        name = resolve_name(func) or str(getattr(func, "__name__", func))
        self._gpu.findings.mixed(name, operands, strangers)
        if written:
            return args[0]  # what is elsewhere is not written to
        guarded, self._gpu.guarded = self._gpu.guarded, 0  # what is still mixed now is repaired below autograd
        try:
            return func(*self._moved(args), **self._moved(kwargs))
        finally:
            self._gpu.guarded = guarded

    def _moved(self, value: Any) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            if is_simulated(tensor) or not tensor.dim():
                return tensor
            with self._gpu.silently():
                return tensor.to(HOME)

        return map_tensors(value, moved)
