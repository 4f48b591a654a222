"""Out of memory: what it looks like on each device, what to do before trying again, what to say if nothing helps."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from hotloop.device.backend import backend_of, is_capturing
from hotloop.errors import DoesNotFit, HotloopError
from hotloop.memory.fragmentation import Fragmented, are_on, judged
from hotloop.memory.usage import DeviceHoldings, Usage, usage
from hotloop.printing.text import size

T = TypeVar("T")
ATTEMPTS = 4  # at work that cannot be done in smaller pieces

# What backends and libraries say that have no type for it; a message is asked only where the type does not tell.
_SAYINGS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized when calling `cublascreate",  # it is memory that the handle lacks
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_insufficient_resources",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, whichever device it was.

    >>> is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8.9 GB)"))
    True
    """
    if isinstance(error, HotloopError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _SAYINGS)


def began_with(error: BaseException) -> BaseException:
    """The error that others came of, as a failed capture comes of what failed in it."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


@dataclass(frozen=True)
class Failure:
    """What stays of an error when memory ran out: the error itself holds the frames, and they hold the tensors."""

    said: str
    allocated: int | None = None  # bytes in tensors at that moment
    fragmented: Fragmented | None = None  # there was enough memory at that moment, but in pieces

    @classmethod
    def of(cls, error: BaseException, device: torch.device) -> "Failure":
        """To be asked inside the `except` block, where everything is still there."""
        backend = backend_of(device)
        return cls(_words(error), backend.memory_allocated(), judged(str(error), backend.memory_stats()))


def clear(device: torch.device) -> None:
    """Free what a failed attempt has left. Call it outside the `except` block, whose traceback holds tensors."""
    gc.collect()
    backend_of(device).empty_cache()  # pieces of another size need blocks of another size


def surely(call: Callable[[], T], device: torch.device) -> T:
    """A call that changes nothing before it succeeds; where memory runs out, again after unused memory was released."""
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if not is_out_of_memory(error) or is_capturing():
                raise
        clear(device)
    return call()


def does_not_fit(failure: Failure, held: DeviceHoldings, device: torch.device) -> DoesNotFit:
    """The error for a single item that is too large: what filled the memory, and what would make it fit."""
    now = usage(device)
    activations = None if failure.allocated is None else max(failure.allocated - held.total, 0)
    figures = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer state": held.optimizer,
        "activations": activations,
        "other processes": now.others,
    }
    said = ", ".join(f"{name} {size(amount)}" for name, amount in figures.items() if amount is not None)
    of = "" if now.total is None else f", of {size(now.total)}"
    return DoesNotFit(
        f"a single item does not fit into the memory of {device}\n"
        f"  what fills it: {said}{of}\n  torch says: {failure.said}",
        fix="; ".join(_advice(held, activations, now, backend_of(device).memory_share())),
    )


def half_updated(error: BaseException) -> DoesNotFit:
    """The error for memory that ran out inside an optimizer which could not be rewound."""
    return DoesNotFit(
        "memory ran out while the optimizer was changing the weights: some of them may be updated and others not\n"
        f"  torch says: {_words(error)}",
        fix="go on from a checkpoint, not from these weights; make room with a smaller batch, an optimizer that keeps"
        " less (SGD, or Adafactor), or by ending other processes on the device",
    )


def _advice(held: DeviceHoldings, activations: int | None, now: Usage, share: float) -> list[str]:
    """What would make it fit, the likeliest first."""
    total = now.total or 0
    advice: list[str] = []
    if share < 1:
        advice.append(f"this process may take {share:.0%} of the memory: raise that share")
    if (now.others or 0) > 0.1 * total:
        advice.append(f"end the other processes, which hold {size(now.others)}")
    cached = now.cached or 0
    if cached > 0.2 * total and not are_on():
        advice.append(
            f"{size(cached)} are reserved and in no tensor: begin with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if activations is None or activations >= held.total:
        advice.append("make the items smaller (shorter sequences, smaller images) or compute in bf16")
    if activations is None or activations < held.total:
        if held.optimizer > 1.5 * held.parameters:
            advice.append(f"an optimizer that keeps less, such as SGD or Adafactor, saves up to {size(held.optimizer)}")
        advice.append("train a smaller model, or freeze a part of it")
    return advice


def _words(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error).strip().splitlines() or ["out of memory"])[0]
