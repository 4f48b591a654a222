"""What is known of an operation beforehand, from its schema: asked once for each."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hotloop.simulate.events import Shape
from hotloop.simulate.rules import WHOLE

# Arguments that may, or must, stay on the host while the others are on the device; crossing.py has `index`.
_HOST_ARGUMENTS = {
    "index_put": {"indices"},
    "index_put_": {"indices"},
    "_index_put_impl_": {"indices"},
    "_unsafe_index": {"indices"},
    "_unsafe_index_put": {"indices"},
    "copy_": {"self", "src"},
    "_foreach_copy_": {"self", "src"},
    "set_": {"self", "source"},
    "_pack_padded_sequence": {"lengths"},
    "_pack_padded_sequence_backward": {"batch_sizes"},
    "_pad_packed_sequence": {"batch_sizes"},
    "_ctc_loss": {"targets", "input_lengths", "target_lengths"},
    "_ctc_loss_backward": {"targets", "input_lengths", "target_lengths"},
    "_cudnn_rnn": {"dropout_state"},
    "_has_compatible_shallow_copy_type": {"self", "from"},
    "is_same_size": {"self", "other"},
    "resize_as_": {"the_template"},
    "_resize_output_": {"self"},
}
# Operations that do not take a number from the host in place of a tensor.
_STRICT = {"embedding", "index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "cat", "stack"}
_WITHOUT_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "detach_", "alias", "lift",
    "lift_fresh", "_unsafe_view", "resize_", "resize_as_", "set_", "_reshape_alias", "is_same_size", "requires_grad_",
    "record_stream", "rename", "as_strided_", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
}  # fmt: skip


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


@cache
def facts(func: Any) -> OperationSchema:
    """What the schema of an operation tells."""
    schema = func._schema
    name = schema.name.split("::")[-1]
    tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return OperationSchema(
        name=name,
        names=tuple(argument.name for argument in schema.arguments),
        written=frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        host=frozenset(_HOST_ARGUMENTS.get(name, ())),
        strict=name in _STRICT,
        kernel=not (func.is_view or name in _WITHOUT_KERNEL),
        makes=not tensors or name == "lift_fresh",
        composite=name not in WHOLE
        and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
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


def is_simulated(tensor: Any) -> bool:
    """Whether a tensor is on the simulated device."""
    device = getattr(tensor, "fake_device", None)
    return device is not None and device.type == "cuda"


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
