"""hotloop's own CUDA kernels, compiled where they run: what lies between matmuls and convolutions, in few passes over
memory."""

from hotloop.kernels.convolutions import convolved, cuts_into_patches, is_awkward, missing, padded, prepare_convolutions
from hotloop.kernels.depthwise import is_depthwise
from hotloop.kernels.layers import fuse, layers_to_fuse, prepare
from hotloop.kernels.nvrtc import why_no_kernels
from hotloop.kernels.preload import bf16_matmuls, load_beside
from hotloop.kernels.rows import RowKernels, prepare_rows

__all__ = [
    "RowKernels",
    "bf16_matmuls",
    "convolved",
    "cuts_into_patches",
    "fuse",
    "is_awkward",
    "is_depthwise",
    "layers_to_fuse",
    "load_beside",
    "missing",
    "padded",
    "prepare",
    "prepare_convolutions",
    "prepare_rows",
    "why_no_kernels",
]
