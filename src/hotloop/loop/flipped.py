"""Convolutions whose input's gradient is computed by a forward pass too, with the weights flipped."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hotloop.levers import can_be_flipped


def flipped(layer: nn.Conv2d, batch: Tensor) -> Tensor:
    """The output of a layer; its backward pass computes the input's gradient by a forward convolution.

    The gradient of a convolution with stride 1 is itself one, of the output's gradient with the weights turned round.
    Where a library has put less work into its backward passes than into the forward one, that is faster.
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
        settings: list[Any] = [[weight.shape[0]], [1, 1], list(ctx.padding), [1, 1], False, [0, 0], 1]
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(gradient, batch, weight, *settings, wanted)
        return of_batch, of_weight, of_bias, None
