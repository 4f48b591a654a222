"""Convolutions with channels in multiples of 8, which tensor cores read at once: zeros lie beyond the last channel."""

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MULTIPLE = 8  # of elements of two bytes: 16 bytes


def missing(size: int) -> int:
    """How many are missing to the next multiple of 8."""
    return -size % MULTIPLE


def padded(tensor: Tensor, *more: int) -> Tensor:
    """A tensor with zeros at the end of its last dimensions, the last one first."""
    return F.pad(tensor, [number for each in more for number in (0, each)]) if any(more) else tensor


def has_odd_channels(layer: nn.Module) -> "TypeGuard[nn.Conv2d | nn.ConvTranspose2d]":
    """Whether a layer is a convolution that is faster with zeros beyond its channels.

    One whose windows do not overlap, as it cuts a picture into patches, is slower with them.
    """
    if type(layer) not in (nn.Conv2d, nn.ConvTranspose2d):
        return False
    assert isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)
    overlaps = any(size > stride for size, stride in zip(layer.kernel_size, layer.stride, strict=True))
    is_odd = missing(layer.in_channels) or missing(layer.out_channels)
    return bool(is_odd and overlaps and layer.groups == 1 and layer.padding_mode == "zeros")


def padded_convolution(
    layer: nn.Conv2d | nn.ConvTranspose2d, batch: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """The output of such a layer for images, computed in a half precision."""
    inputs, outputs = missing(layer.in_channels), missing(layer.out_channels)
    is_transposed = isinstance(layer, nn.ConvTranspose2d)
    weight = padded(layer.weight.to(dtype), 0, 0, *((outputs, inputs) if is_transposed else (inputs, outputs)))
    bias = None if bias is None else padded(bias.to(dtype), outputs)
    convolve: Any = F.conv_transpose2d if is_transposed else F.conv2d
    more: dict[str, Any] = {"output_padding": layer.output_padding} if is_transposed else {}
    output: Tensor = convolve(
        padded(batch.to(dtype), 0, 0, inputs),
        weight,
        bias,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        **more,
    )
    if not outputs:
        return output
    together = output.is_contiguous(memory_format=torch.channels_last)
    own = output[:, : layer.out_channels]
    return own.contiguous(memory_format=torch.channels_last if together else torch.contiguous_format)
