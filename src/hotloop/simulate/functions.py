"""Operands on different devices are repaired where autograd still sees it, so that all bugs are found in one run."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from hotloop.placement.golden import operands_of
from hotloop.simulate.dispatch import Mixed, SimulatedGpu
from hotloop.simulate.operations import is_simulated


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
        finally:
            self._gpu.guarded -= 1
        operands = list(operands_of(func, args, kwargs))
        strangers = [(name, t) for name, t in operands if not is_simulated(t) and t.dim()] or operands[:1]
        self._gpu.findings.mixed(_name(func), operands, strangers)
        if written:
            return args[0]  # what stays on the host is not written to
        guarded, self._gpu.guarded = self._gpu.guarded, 0  # what is still mixed now is repaired below autograd
        try:
            return func(*self._moved(args), **self._moved(kwargs))
        finally:
            self._gpu.guarded = guarded

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if is_simulated(value) or not value.dim() else self._to_device(value)
        if isinstance(value, dict):
            return {key: self._moved(item) for key, item in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._moved(item) for item in value)
        return value

    def _to_device(self, tensor: Tensor) -> Tensor:
        self._gpu.silent += 1
        try:
            return tensor.to("cuda")
        finally:
            self._gpu.silent -= 1


def _name(func: Callable[..., Any]) -> str:
    return resolve_name(func) or str(getattr(func, "__name__", func))
