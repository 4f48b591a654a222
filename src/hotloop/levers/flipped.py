"""The gradients of convolutions are computed by forward passes and matmuls, not by the library's backward passes."""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import is_transformed
from hotloop.levers.base import Lever, LeverRule, LeverTarget, Undo, replace_forward
from hotloop.plan import Plan

AT_ONCE = 32 * 2**20  # bytes of unfolded input in one matmul


class FlippedLever(Lever):
    """**What it does.** The input gradient of a convolution of stride 1 is a convolution too: of the gradient of its
    output, with the weights flipped and their two channel dimensions exchanged. PyTorch calls its library's backward
    pass for it. On some CPUs that is much slower than a forward pass of the same size, so hotloop calls the forward
    pass. It computes the weight gradient as a matmul: all positions of the output, times the input window at each.

    **The numbers.** Tier B: the same products are added in another order.

    **What it needs.** A CPU, fp32, and an `nn.Conv2d` of stride 1 without dilation or groups and with zero padding
    only; other layers compute as before. It is not combined with a compilation.

    **What it costs.** Copies of the flipped weights in each step, and of the input windows in parts of 32 MiB; both are
    small beside the convolution.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cpu", flipped=True, channels_last=True))
    ```

    **How it is undone.** hotloop restores the `forward` of the layers.

    **When it does not help.** If the library's backward passes are as good as its forward pass: on GPUs, and on many
    x86 processors. On two ARM cores, in channels last, the input gradient of a layer from 64 to 128 channels took 35 ms
    instead of 73, and its weight gradient 40 ms instead of 56.
    """

    name = "flipped"
    order = 120
    tier = "B"
    what = "gradients of convolutions are computed as convolutions with flipped weights"
    cost = "nothing"
    undo = "the layers' `forward` is restored"
    computes_the_same = True
    rule = LeverRule(
        "an ARM CPU trains convolutions of stride 1",
        lambda facts: platform.machine().lower() in ("aarch64", "arm64"),
        "Two ARM cores: the input gradient of a layer from 64 to 128 channels took 35 ms instead of 73",
    )

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, flipped=True, compile="off")

    def off(self, plan: Plan) -> Plan:
        return replace(plan, flipped=False)

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        if target.device.type != "cpu":
            return f"it is for CPUs, and this is {target.device.type}"
        if plan.precision != "fp32":
            return f"the convolutions are in {plan.precision}"
        if plan.compile != "off":
            return "the step is compiled"
        able = any(can_be_flipped(module) for module in target.model.modules())
        return None if able else "the model has no two-dimensional convolution of stride 1"

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        for layer in filter(can_be_flipped, model.modules()):
            assert isinstance(layer, nn.Conv2d)
            yield replace_forward(layer, flipped, layer)


def can_be_flipped(layer: nn.Module) -> bool:
    """Whether the gradient of a layer's input is a convolution of the same kind, with the weights turned round."""
    return (
        type(layer) is nn.Conv2d
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and all(pad < size for pad, size in zip(layer.padding, layer.kernel_size, strict=True))
    )


def flipped(layer: nn.Conv2d, batch: Tensor) -> Tensor:
    """The output of a layer; its backward pass computes the input's gradient by a forward convolution.

    The gradient of a convolution with stride 1 is itself one, of the output's gradient with the weights turned round.
    Where a library has put less work into its backward passes than into the forward one, that is faster. The gradient
    of the weight is a matmul: all places of the output, times what the weight has seen at each.
    """
    is_other = batch.dim() != 4 or torch.is_autocast_enabled(batch.device.type) or is_transformed()
    if is_other or not can_be_flipped(layer):
        return nn.Conv2d.forward(layer, batch)
    result: Tensor = _Flipped.apply(batch, layer.weight, layer.bias, layer.padding)  # type: ignore[no-untyped-call]
    return result


class _Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(batch, weight)
        ctx.padding = padding
        return F.conv2d(batch, weight, bias, padding=padding)

    @staticmethod
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
