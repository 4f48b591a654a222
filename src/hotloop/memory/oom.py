"""Out of memory: what it looks like on each device, and what to do before trying again."""

import gc

import torch

from hotloop.errors import HotloopError

# What backends and libraries say that have no type for it; a message is asked only where the type does not tell.
_SAYINGS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
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
    return type(error) is RuntimeError and any(words in str(error) for words in _SAYINGS)


def clear(device: torch.device) -> None:
    """Let go of what a failed attempt has left. Call it outside the `except` block, whose traceback holds tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # pieces of another size need blocks of another size
    elif device.type == "mps":
        torch.mps.empty_cache()


def room(device: torch.device) -> int | None:
    """Bytes that could still be taken on a device, as far as it tells: other processes and a cap are counted in."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    cap = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free, cap - reserved) + reserved - torch.cuda.memory_allocated(device)
