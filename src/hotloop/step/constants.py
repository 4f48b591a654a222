"""Small tensors that a step makes on the host and copies to a CUDA device: they are made on the device instead.

`torch.tensor([0.5, 2.0], device=x.device)` waits for the device, and a copy from the host cannot be captured as it is.
The numbers are part of the step as those of `x * 0.5` are: an inspection compares them, and a capture keeps them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hotloop._torch import DispatchMode
from hotloop.device.backend import backend_of
from hotloop.step.dispatching import is_few, name_of


@contextmanager
def made_on_device() -> Iterator[None]:
    """Inside the block, small host tensors reach a CUDA device without a copy or synchronization."""
    with _visible, _FromHost():
        yield


class _VisibleTensor:
    """Patches `torch.tensor`, for all threads, while any is inside, to see its copies to a device.

    Not a mode of functions, for which compiled parts of a model would be compiled again.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._lock = Lock()
        self._original: Callable[..., Tensor] = torch.tensor

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._original = torch.tensor
                torch.tensor = _visible_copy_of(self._original)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.tensor = self._original


def _visible_copy_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def tensor(*args: Any, device: Any = None, requires_grad: bool = False, **others: Any) -> Tensor:
        if not _can_capture(device):
            return original(*args, device=device, requires_grad=requires_grad, **others)
        made = original(*args, **others).to(device)
        return made.requires_grad_() if requires_grad else made

    return tensor


_visible = _VisibleTensor()


class _FromHost(DispatchMode):
    """Replaces the copy of a small tensor to the device by filling one there."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if name_of(func) == "aten._to_copy.default" and _can_capture(kwargs.get("device")) and is_few(args[0]):
            source = args[0] if kwargs.get("dtype") is None else args[0].to(kwargs["dtype"])
            return filled(source, kwargs["device"])
        return func(*args, **kwargs)


def filled(source: Tensor, device: torch.device) -> Tensor:
    """A copy of a small tensor on a device, made of its numbers alone.

    >>> filled(torch.tensor([[1.0, -2.0]]), torch.device("cpu"))
    tensor([[ 1., -2.]])
    """
    made = torch.empty(source.shape, dtype=source.dtype, device=device)
    numbers = source.flatten().tolist()
    if len({repr(number) for number in numbers}) == 1:
        return made.fill_(numbers[0])
    for place, number in zip(made.view(-1), numbers, strict=True):
        place.fill_(number)
    return made


def _can_capture(device: Any) -> bool:
    """Whether an argument names a device on which work can be captured; one that names none is PyTorch's to refuse."""
    if device is None:
        return False
    with suppress(RuntimeError, TypeError):
        return backend_of(torch.device(device)).can_capture
    return False
