"""hotloop's own CUDA kernels, compiled where they run: what lies between matmuls and convolutions, in few passes over
memory.

A lever names the file that it uses, `kernels.rows`, which is imported when it does, on a GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from hotloop.kernels import convolutions as convolutions
    from hotloop.kernels import depthwise as depthwise
    from hotloop.kernels import layers as layers
    from hotloop.kernels import nvrtc as nvrtc
    from hotloop.kernels import preload as preload
    from hotloop.kernels import rows as rows

MULTIPLE = 8  # of elements of two bytes: 16 bytes


def missing(size: int) -> int:
    """How many are missing to the next multiple of 8."""
    return -size % MULTIPLE


def padded(tensor: Tensor, *more: int) -> Tensor:
    """A tensor with zeros at the end of its last dimensions, the last one first."""
    return pad(tensor, [number for each in more for number in (0, each)]) if any(more) else tensor


def __getattr__(name: str) -> object:
    if name not in ("convolutions", "depthwise", "layers", "nvrtc", "preload", "rows"):
        raise AttributeError(f"{__name__} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
