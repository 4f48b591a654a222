"""An operation that is called: what its schema tells, asked once for each, and the tensors among its arguments."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hotloop._torch import schema_of
from hotloop.apps.simulate._torch import is_composite, is_fake, is_simulated
from hotloop.apps.simulate.events import Shape
from hotloop.apps.simulate.families import HOST, IDLE, STRICT, WHOLE


@dataclass(frozen=True)
class OperationSchema:
    """An operation's schema, as far as it matters here."""

    name: str  # without namespace and overload
    names: tuple[str, ...]  # of its arguments
    written: frozenset[str]  # arguments that it writes to
    host: frozenset[str]  # arguments that may be on the host
    strict: bool  # does not take a number from the host either
    kernel: bool  # does something on the device
    makes: bool  # makes a tensor from none
    composite: bool  # is made of others, which are what runs
    determined: bool  # gives the same for the same values: no random numbers, no memory as it is found


@cache
def facts(func: Any) -> OperationSchema:
    """What the schema of an operation tells."""
    schema = schema_of(func)
    name = schema.name.split("::")[-1]
    tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return OperationSchema(
        name=name,
        names=tuple(argument.name for argument in schema.arguments),
        written=frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        host=frozenset(HOST.get(name, ())),
        strict=name in STRICT,
        kernel=not (func.is_view or name in IDLE),
        makes=not tensors or name == "lift_fresh",
        composite=name not in WHOLE and is_composite(func),
        determined=not (torch.Tag.nondeterministic_seeded in func.tags or "empty" in name or "resize" in name),
    )


def named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call by the names of its schema."""
    return [*zip(facts(func).names, args, strict=False), *kwargs.items()]


def shape_of(tensor: Tensor) -> Shape:
    """A tensor without its values."""
    sizes = tuple(tensor.size())
    strides: tuple[int, ...] = ()
    last = False
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        strides = tuple(tensor.stride())
        last = len(sizes) == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    dtype, device = tensor.dtype, "cuda" if is_simulated(tensor) else "cpu"
    return Shape(sizes, _dtype_name(dtype), dtype.itemsize, device, last, strides)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plain(value: Any) -> Any:
    """An argument that is no tensor, as plain data."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value).removeprefix("torch.")


def is_host(value: Any) -> bool:
    """Whether a value is a tensor with data."""
    return isinstance(value, Tensor) and not is_fake(value)


def on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
