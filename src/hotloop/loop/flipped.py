"""Convolutions whose gradients are computed by forward passes and products, not by the library's backward passes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hotloop.levers import can_be_flipped

FEW = 64  # numbers that a weight sees at once: 3 × 3 pixels of up to 7 channels


def flipped(layer: nn.Conv2d, batch: Tensor) -> Tensor:
    """The output of a layer; its backward pass computes the input's gradient by a forward convolution.

    The gradient of a convolution with stride 1 is itself one, of the output's gradient with the weights turned round.
    Where a library has put less work into its backward passes than into the forward one, that is faster. The gradient
    of a weight that sees few numbers at once, as that of a layer for colours, is one product of matrices.
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
        wanted = [False, ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        if wanted[1] and weight[0].numel() <= FEW:
            of_weight, of_bias = _by_product(gradient, batch, weight, ctx.padding)
            return of_batch, of_weight, of_bias if wanted[2] else None, None
        settings: list[Any] = [[weight.shape[0]], [1, 1], list(ctx.padding), [1, 1], False, [0, 0], 1]
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(gradient, batch, weight, *settings, wanted)
        return of_batch, of_weight, of_bias, None


def _by_product(gradient: Tensor, batch: Tensor, weight: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias: all places of the output, times what the weight has seen at each."""
    rows = gradient.permute(0, 2, 3, 1).reshape(-1, gradient.shape[1])
    (down, across), (high, wide) = padding, weight.shape[2:]
    seen = F.pad(batch, (across, across, down, down)).unfold(2, high, 1).unfold(3, wide, 1)
    patches = seen.permute(0, 2, 3, 1, 4, 5).reshape(len(rows), -1)
    return (rows.mT @ patches).view_as(weight), rows.sum(0)
