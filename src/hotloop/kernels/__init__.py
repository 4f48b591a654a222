"""hotloop's own CUDA kernels, compiled where they run: what lies between matmuls and convolutions, in few passes over
memory.

Nothing is imported before one of these names is used, by a lever on a GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.kernels.convolutions import convolved as convolved
    from hotloop.kernels.convolutions import cuts_into_patches as cuts_into_patches
    from hotloop.kernels.convolutions import is_awkward as is_awkward
    from hotloop.kernels.convolutions import missing as missing
    from hotloop.kernels.convolutions import padded as padded
    from hotloop.kernels.convolutions import prepare_convolutions as prepare_convolutions
    from hotloop.kernels.depthwise import is_depthwise as is_depthwise
    from hotloop.kernels.layers import fuse as fuse
    from hotloop.kernels.layers import layers_to_fuse as layers_to_fuse
    from hotloop.kernels.layers import prepare as prepare
    from hotloop.kernels.nvrtc import why_no_kernels as why_no_kernels
    from hotloop.kernels.preload import bf16_matmuls as bf16_matmuls
    from hotloop.kernels.preload import load_beside as load_beside
    from hotloop.kernels.rows import RowKernels as RowKernels
    from hotloop.kernels.rows import prepare_rows as prepare_rows

_HOMES = {
    "RowKernels": "rows",
    "bf16_matmuls": "preload",
    "convolved": "convolutions",
    "cuts_into_patches": "convolutions",
    "fuse": "layers",
    "is_awkward": "convolutions",
    "is_depthwise": "depthwise",
    "layers_to_fuse": "layers",
    "load_beside": "preload",
    "missing": "convolutions",
    "padded": "convolutions",
    "prepare": "layers",
    "prepare_convolutions": "convolutions",
    "prepare_rows": "rows",
    "why_no_kernels": "nvrtc",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"{__name__} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
