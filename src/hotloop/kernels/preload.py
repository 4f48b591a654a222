"""Kernels of PyTorch and its libraries, loaded in threads beside the first steps of a run.

CUDA loads a kernel when it is first used, together with those that were compiled with it. On an H200 that takes 5 to
20 ms for a kind of operation and 75 ms for the matmuls of a precision, in which a run would stand still.
"""

from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import torch

from hotloop._torch import is_simulated_gpu

SIDE = 64  # of small matrices
_begun: set[tuple[torch.device, Callable[[torch.device], object]]] = set()


def load_beside(device: torch.device, use: Callable[[torch.device], object]) -> Thread | None:
    """Let a thread use kernels on small tensors of its own; None where that was done before, or is not needed.

    What fails there is met again by whoever needs it.
    """
    if device.type != "cuda" or is_simulated_gpu() or (device, use) in _begun:
        return None
    _begun.add((device, use))
    thread = Thread(target=_used, args=(device, use), name="hotloop-loading")
    thread.start()
    return thread


def _used(device: torch.device, use: Callable[[torch.device], object]) -> None:
    with suppress(Exception), torch.cuda.device(device), torch.no_grad():
        use(device)


def bf16_matmuls(device: torch.device) -> None:
    """The matmuls of a linear layer: its output, and the gradients of its input and of its weights."""
    matrix = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    for first, second in ((matrix, matrix.T), (matrix, matrix), (matrix.T, matrix)):
        first @ second
