"""The operations that a call makes on real or meta tensors, as the models of time and memory see them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotloop._torch import schema_of
from hotloop.apps.simulate._torch import OperationMode
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.values.tree import tensors_of


def observe(call: Callable[[], Any]) -> list[Operation]:
    """All operations of a call, as if every tensor were on the simulated device.

    >>> a = torch.ones(2, 3, device="meta")
    >>> [operation.name for operation in observe(lambda: a @ a.T)]
    ['aten.permute.default', 'aten.mm.default']
    """
    observer = _Observer()
    with observer:
        call()
    return observer.operations


class _Observer(OperationMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations.append(operation_of(func, args, kwargs, result))
        return result


def operation_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation:
    """One call of an operation, without its values."""
    names = [argument.name for argument in schema_of(func).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    plain = {name: value for name, value in given.items() if not _tensors(value)}
    return Operation(str(func), _shapes((args, kwargs)), _shapes(result), plain)


def _tensors(value: Any) -> list[Tensor]:
    return tensors_of(value)


def _shapes(value: Any) -> tuple[Shape, ...]:
    return tuple(
        Shape(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.itemsize, "cuda", _channels_last(t))
        for t in _tensors(value)
    )


def _channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(tensor.dim())
    return (
        wanted is not None
        and tensor.is_contiguous(memory_format=wanted)
        and not tensor.is_contiguous()  # images of one channel or one pixel are both
    )
