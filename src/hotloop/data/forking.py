"""Workers that are forked from a process with a GPU must not free what lives there."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forking() -> Iterator[None]:
    """Around the start of a loader's workers: garbage that they are born with is left to their parent.

    A forked process cannot speak to CUDA. Where its garbage collector comes upon a cycle of the parent's, and a tensor
    on the GPU is in it, the attempt to free that tensor aborts the worker.
    """
    if not torch.cuda.is_initialized() or gc.get_freeze_count():  # a person who freezes has their own idea of it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
