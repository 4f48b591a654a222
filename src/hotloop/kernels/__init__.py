"""hotloop's own CUDA kernels, compiled where they run: what lies between convolutions, in one pass over memory."""

from hotloop.kernels.layers import fuse, layers_to_fuse, prepare
from hotloop.kernels.nvrtc import why_no_kernels
from hotloop.kernels.padding import has_odd_channels, missing, padded, padded_convolution

__all__ = [
    "fuse",
    "has_odd_channels",
    "layers_to_fuse",
    "missing",
    "padded",
    "padded_convolution",
    "prepare",
    "why_no_kernels",
]
