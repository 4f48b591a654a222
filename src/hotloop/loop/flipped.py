"""Convolutions whose gradients are computed by forward passes and products, not by the library's backward passes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hotloop.levers import can_be_flipped

AT_ONCE = 32 * 2**20  # bytes of what the weight has seen that are laid out together


def flipped(layer: nn.Conv2d, batch: Tensor) -> Tensor:
    """The output of a layer; its backward pass computes the input's gradient by a forward convolution.

    The gradient of a convolution with stride 1 is itself one, of the output's gradient with the weights turned round.
    Where a library has put less work into its backward passes than into the forward one, that is faster. The gradient
    of the weight is a product of matrices: all places of the output, times what the weight has seen at each.
    """
    if not can_be_flipped(layer) or batch.dim() != 4 or torch.is_autocast_enabled(batch.device.type):
        plain: Tensor = layer._conv_forward(batch, layer.weight, layer.bias)
        return plain
    result: Tensor = _Flipped.apply(batch, layer.weight, layer.bias, layer.padding)  # type: ignore[no-untyped-call]
    return result


class _Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(batch, weight)
        ctx.padding = padding
        return F.conv2d(batch, weight, bias, padding=padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        batch, weight = ctx.saved_tensors
        of_batch = None
        if ctx.needs_input_grad[0]:
            form = torch.channels_last if gradient.is_contiguous(memory_format=torch.channels_last) else None
            turned = weight.flip(2, 3).transpose(0, 1)
            turned = turned.contiguous(memory_format=form) if form else turned.contiguous()
            rest = [size - 1 - pad for size, pad in zip(weight.shape[2:], ctx.padding, strict=True)]
            of_batch = F.conv2d(gradient, turned, padding=rest)
        of_weight, of_bias = None, None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            of_weight, of_bias = _of_parameters(gradient, batch, weight, ctx.padding)
        return of_batch, of_weight, of_bias if ctx.needs_input_grad[2] else None, None


def _of_parameters(gradient: Tensor, batch: Tensor, weight: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, a few images at a time."""
    outputs, inputs, high, wide = weight.shape
    _, _, tall, long = gradient.shape
    rows = gradient.permute(0, 2, 3, 1).reshape(-1, outputs)
    across, down = padding[1], padding[0]
    padded = F.pad(batch.permute(0, 2, 3, 1), (0, 0, across, across, down, down)).contiguous()
    image, line, pixel, _ = padded.stride()
    images = max(1, AT_ONCE // (tall * long * high * wide * inputs * batch.element_size()))
    total = rows.new_zeros(outputs, high * wide * inputs)
    for some, seen in zip(rows.split(images * tall * long), padded.split(images), strict=True):
        # The pixels of a line that the weight sees lie side by side, so that they are copied together.
        patches = seen.as_strided(
            (len(seen), tall, long, high, wide * inputs), (image, line, pixel, line, 1), seen.storage_offset()
        )
        total.addmm_(some.mT, patches.reshape(len(some), -1))
    of_weight = total.view(outputs, high, wide, inputs).permute(0, 3, 1, 2)
    return of_weight, torch.mv(rows.mT, rows.new_ones(len(rows)))
