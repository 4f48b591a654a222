"""Operands on different devices are repaired where autograd still sees it, so that all bugs are found in one run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from hotloop._torch import map_leaves
from hotloop.apps.simulate._torch import is_simulated
from hotloop.apps.simulate.dispatch import Mixed, SimulatedGpu
from hotloop.placement.golden import operands_of


class Repairs(TorchFunctionMode):
    """Lets the device refuse a call, says why, and calls again with what was on the host moved."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        called = self._gpu.between.calls()
        try:
            return self._call(func, args, kwargs or {})
        finally:
            self._gpu.between.called(called)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._gpu.guarded += 1
        try:
            return func(*args, **kwargs)
        except Mixed as refused:
            home, written = refused.home, refused.written
        except NotImplementedError:  # numbers of the device in a list are read below where anyone is asked
            if func is not torch.tensor:
                raise
            read = map_leaves(lambda leaf: leaf.item() if is_simulated(leaf) else leaf, args)
            return func(*read, **kwargs)
        finally:
            self._gpu.guarded -= 1
        operands = list(operands_of(func, args, kwargs))
        strangers = [(n, t) for n, t in operands if t.device != home and (is_simulated(t) or t.dim())] or operands[:1]
        name = resolve_name(func) or str(getattr(func, "__name__", func))
        self._gpu.findings.mixed(name, operands, strangers)
        if written:
            return args[0]  # what is elsewhere is not written to
        guarded, self._gpu.guarded = self._gpu.guarded, 0  # what is still mixed now is repaired below autograd
        try:
            return func(*self._moved(args, home), **self._moved(kwargs, home))
        finally:
            self._gpu.guarded = guarded

    def _moved(self, value: Any, home: torch.device) -> Any:
        if isinstance(value, Tensor):
            stays = value.device == home or not (is_simulated(value) or value.dim())
            return value if stays else self._to_device(value, home)
        if isinstance(value, dict):
            return {key: self._moved(item, home) for key, item in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._moved(item, home) for item in value)
        return value

    def _to_device(self, tensor: Tensor, home: torch.device) -> Tensor:
        with self._gpu.silently():
            return tensor.to(home)
