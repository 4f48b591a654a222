"""hotloop's own CUDA kernels, compiled where they run: what lies between convolutions, in one pass over memory."""

from hotloop.kernels.layers import fuse, layers_to_fuse, prepare
from hotloop.kernels.nvrtc import why_no_kernels

__all__ = ["fuse", "layers_to_fuse", "prepare", "why_no_kernels"]
