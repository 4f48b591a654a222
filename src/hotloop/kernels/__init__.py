"""hotloop's own CUDA kernels, compiled where they run: what lies between convolutions, in one pass over memory."""

from hotloop.kernels.convolutions import convolved, cuts_into_patches, is_awkward, missing, padded, prepare_patches
from hotloop.kernels.layers import fuse, layers_to_fuse, prepare
from hotloop.kernels.nvrtc import why_no_kernels

__all__ = [
    "convolved",
    "cuts_into_patches",
    "fuse",
    "is_awkward",
    "layers_to_fuse",
    "missing",
    "padded",
    "prepare",
    "prepare_patches",
    "why_no_kernels",
]
