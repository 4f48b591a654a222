"""`move` puts a batch of any nesting on a device; `to_numpy` brings a tensor back from any device."""

from collections import UserDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hotloop.device import as_device, device_error
from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument
from hotloop.printing.text import an
from hotloop.values.kinds import WORD_KINDS
from hotloop.values.tree import map_leaves, map_tensors

T = TypeVar("T")
LARGE = 64 << 20  # bytes of a tensor that is worth pinned memory for its copy
PIECE = 16 << 20  # bytes that are copied at a time


def move(batch: T, device: str | torch.device) -> T:
    """`batch` with every tensor on `device`; its types are kept and everything else in it is left alone.

    Takes dicts and other mappings (Hugging Face encodings), lists, tuples, namedtuples, dataclasses, and anything with
    a `.to` method (tensors, packed sequences), in any nesting. A part in which nothing moves is returned as the same
    object.

    >>> batch = {"image": torch.zeros(2, 3), "name": ["a", "b"]}
    >>> move(batch, "cpu") is batch
    True
    >>> move(batch, "meta")["image"].device
    device(type='meta')
    """
    target = device if isinstance(device, torch.device) else as_device(device)
    try:
        if _is_there(batch, target):  # so are most batches of a CPU, and to rebuild them costs more than a kernel
            return batch
        leaf = partial(_move_leaf, device=target, may_be_async=backend_of(target).non_blocking)
        moved: T = map_leaves(batch, leaf, _moves_itself)
    except RecursionError as error:
        raise _endless(batch) from error
    except (AssertionError, RuntimeError) as error:  # what torch raises where the device is not there
        if why := device_error(target, error):
            raise why from error
        raise
    return moved


def upload(items: T, device: torch.device) -> T:
    """`items` on the device, as `move` does it; large tensors in ordinary memory several times as fast.

    The driver copies such memory by one thread. Here all threads of PyTorch copy it piece by piece into pinned memory,
    from where the GPU takes one piece while the next is copied.
    """
    if not backend_of(device).non_blocking:
        return move(items, device)
    large: T = map_tensors(items, partial(_upload_leaf, device=device))
    return move(large, device)


def upload_beside(items: T, device: torch.device) -> "Future[T]":
    """The same by a thread, on the present stream of the device."""
    backend = backend_of(device)

    def uploaded() -> T:
        with backend.current(), backend.on_stream(stream):
            return upload(items, device)

    stream, pool = backend.current_stream(), ThreadPoolExecutor(1, "hotloop-upload")
    try:
        return pool.submit(uploaded)
    finally:
        pool.shutdown(wait=False)


def is_large(tensor: Tensor) -> bool:
    """Whether a tensor is worth an upload by pieces."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout != torch.strided:
        return False
    is_plain = not (tensor.requires_grad or tensor.is_complex() or tensor.is_quantized)
    return is_plain and tensor.nbytes >= LARGE and tensor.is_contiguous() and not tensor.is_pinned()


def _upload_leaf(tensor: Tensor, device: torch.device) -> Tensor:
    if not is_large(tensor):
        return tensor
    result = torch.empty_like(tensor, device=device)
    source, target = (each.view(-1).view(torch.uint8) for each in (tensor, result))
    backend = backend_of(device)
    stream = backend.current_stream()
    pinned = [
        (torch.empty(PIECE, dtype=torch.uint8, device="cpu", pin_memory=True), backend.new_event()) for _ in range(2)
    ]
    for number, (piece, place) in enumerate(zip(source.split(PIECE), target.split(PIECE), strict=True)):
        buffer, copied = pinned[number % 2]
        copied.synchronize()  # which returns at once where nothing was copied from it
        place.copy_(buffer[: piece.numel()].copy_(piece), non_blocking=True)
        copied.record(stream)
    return result


def pin(batch: T) -> T:
    """`batch` with every host tensor in pinned memory, from where a GPU can copy while both sides go on."""

    def pinned(leaf: Any) -> Any:
        if not _has(leaf, "pin_memory") or (isinstance(leaf, Tensor) and not leaf.is_cpu):
            return leaf
        return leaf.pin_memory()

    try:
        result: T = map_leaves(batch, pinned, lambda part: _has(part, "pin_memory"))
    except RecursionError as error:
        raise _endless(batch) from error
    return result


def _endless(batch: object) -> BadArgument:
    return BadArgument(
        f"the batch, {an(type(batch).__name__)}, holds itself or is nested too deep",
        fix="give a batch without reference cycles, such as from a child to its parent",
    )


def has_strides(tensor: Tensor) -> bool:
    """Whether a tensor lies in one block of memory, in steps that it tells; a sparse or a nested one does not."""
    return tensor.layout == torch.strided and not tensor.is_nested


def known_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor; of a nested one with strides, which refuses to tell one, the number of its parts."""
    return (tensor.size(0),) if tensor.is_nested and tensor.layout == torch.strided else tuple(tensor.shape)


def shape_of(tensor: Tensor) -> str:
    """The shape and the dtype in words."""
    return f"{known_shape(tensor)} {str(tensor.dtype).removeprefix('torch.')}"


def to_numpy(tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The values of a tensor as a NumPy array, whatever its device, gradient or dtype.

    Types that NumPy does not have (bfloat16, float8, half-precision complex) widen to the next one that holds
    them exactly.

    >>> to_numpy(torch.ones(2, dtype=torch.bfloat16, requires_grad=True))
    array([1., 1.], dtype=float32)
    """
    if not isinstance(tensor, Tensor):
        raise BadArgument(
            f"to_numpy was given {an(type(tensor).__name__)}, and takes one tensor",
            fix="convert several one by one: [to_numpy(t) for t in tensors]",
        )
    if tensor.is_nested:
        raise BadArgument(
            "to_numpy was given a nested tensor, whose parts may have several shapes",
            fix="take each by itself, [to_numpy(t) for t in tensor.unbind()], or pad: tensor.to_padded_tensor(0.0)",
        )
    values = tensor.detach()
    if values.is_quantized:
        values = values.dequantize()
    if values.layout != torch.strided:
        values = values.to_dense()
    values = values.cpu().resolve_conj().resolve_neg()
    try:
        return values.numpy()
    except TypeError:  # NumPy has no such type
        return values.to(torch.complex64 if values.is_complex() else torch.float32).numpy()


def _is_there(value: Any, device: torch.device) -> bool:
    """Whether nothing would move: it is made of tensors on the device, lists, tuples, dicts, words and numbers."""
    kind = type(value)
    if kind is Tensor:
        return bool(value.device == device)
    if kind is list or kind is tuple:
        parts = value
    elif kind is dict:
        parts = value.values()
    else:
        return kind in WORD_KINDS
    for part in parts:  # noqa: SIM110  # `all` would make a generator, in every step
        if not _is_there(part, device):
            return False
    return True


def _move_leaf(leaf: Any, *, device: torch.device, may_be_async: bool) -> Any:
    """A tensor, or any object that knows how to move itself, on `device`."""
    if not _moves_itself(leaf):
        return leaf
    data = leaf.data if isinstance(leaf, PackedSequence) else leaf
    if not isinstance(data, Tensor):
        return leaf.to(device)
    # Without streams, or from ordinary memory, the host may read or reuse the bytes too early.
    return leaf.to(device, non_blocking=may_be_async and data.is_cpu and data.is_pinned())


def _moves_itself(value: object) -> bool:
    # The `.to` of Hugging Face's encodings, which are of this kind, would change the one that was given.
    return _has(value, "to") and not isinstance(value, UserDict)


def _has(value: object, method: str) -> bool:
    return callable(getattr(value, method, None)) and not isinstance(value, type)
