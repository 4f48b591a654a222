"""What the kernels compute, in PyTorch's operations on a CPU, so that everything around them can be tried anywhere."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    0: lambda z, slope: z,
    1: F.leaky_relu,
    2: lambda z, slope: F.gelu(z),
    3: lambda z, slope: F.gelu(z, approximate="tanh"),
    4: lambda z, slope: F.silu(z),
}


def rows(image: Tensor, slices: int = 1) -> Tensor:
    """For each slice its pixels, for each pixel its channels."""
    return image.permute(0, 2, 3, 1).reshape(slices, -1, image.shape[1]).float()


def put(target: Tensor | None, values: Tensor) -> None:
    if target is not None:
        count, channels, height, width = target.shape
        target.copy_(values.view(count, height, width, channels).permute(0, 3, 1, 2))


def scaled(x: Tensor, scales: Tensor) -> Tensor:
    return rows(x, len(scales)) * scales[:, :1] + scales[:, 1:2]


class ReferenceKernels:
    """Launched as the kernels are."""

    def __init__(self, macros: Sequence[str]) -> None:
        given = dict(each.split("=") for each in macros if "=" in each)
        self.act = ACTIVATIONS[int(given.get("KIND", 0))]
        self.side = int(given.get("SIDE", 0))

    def launch(self, name: str, grid: Any, block: Any, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def slope_of(self, z: Tensor, slope: float) -> Tensor:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            return torch.autograd.grad(self.act(z, slope).sum(), z)[0]

    def statistics(self, x: Tensor, partial: Tensor, count: int, groups: int, together: int) -> None:
        away = rows(x, len(partial)) - self.pivots(x, len(partial), together)
        partial.zero_()
        partial[:, 0, 0], partial[:, 0, 1] = away.sum(1), away.square().sum(1)

    def pivots(self, x: Tensor, slices: int, together: int) -> Tensor:
        """The first pixel's first channel of those that are normalised together."""
        return rows(x, slices)[:, :1, ::together].repeat_interleave(together, 2)

    def normalization(self, partial: Tensor, blocks: int, channels: int, count: int, x: Tensor, *rest: Any) -> None:
        weight, bias, shift, running_mean, running_var, tracked, momentum, eps, scales = rest
        sums = partial[0].sum(0) / count
        mean, variance = self.pivots(x, 1, 1)[0, 0] + sums[0], sums[1] - sums[0].square()
        factor = weight * (variance + eps).rsqrt()
        scales[0] = torch.stack([factor, bias - mean * factor, mean, (variance + eps).rsqrt()])
        running_mean.lerp_(mean if shift is None else mean + shift, momentum)
        running_var.lerp_(variance * count / (count - 1), momentum)
        tracked.add_(1)

    def group_normalization(
        self, partial: Tensor, blocks: int, channels: int, count: int, together: int, x: Tensor, *rest: Any
    ) -> None:
        weight, bias, shift, _, eps, scales, away = rest
        images = len(scales)
        shift = torch.zeros(images, channels) if shift is None else shift
        shifted = rows(x, images) + shift[:, None]
        mean, variance = (
            moment.repeat_interleave(together, 1)
            for moment in (
                shifted.view(images, count, -1, together).mean((1, 3)),
                shifted.view(images, count, -1, together).var((1, 3), correction=0),
            )
        )
        deviation = (variance + eps).rsqrt()
        factor = weight * deviation
        scales.copy_(torch.stack([factor, bias - (mean - shift) * factor, mean - shift, deviation], 1))
        if away is not None:
            away.copy_((shifted - mean[:, None]).sum(1))

    def shift_scales(self, bias: Tensor, channels: int, scales: Tensor) -> None:
        bias = bias.expand(len(scales), -1)
        one = torch.ones_like(bias)
        scales.copy_(torch.stack([one, bias, one * 0, one], 1))

    def forward(self, x: Tensor, residual: Tensor | None, y: Tensor, scales: Tensor, *rest: Any) -> None:
        z = scaled(x, scales)
        put(y, self.act(z if residual is None else z + rows(residual, len(scales)), rest[-1]))

    def gradient_sums(
        self, gradient: Tensor, x: Tensor, y: Any, before: Any, scales: Tensor, partial: Tensor, *rest: Any
    ) -> None:
        slices = len(scales)
        g = rows(gradient, slices) * self.slope_of(scaled(x, scales) if y is None else rows(y, slices), rest[-1])
        partial.zero_()
        partial[:, 0, 0], partial[:, 0, 1] = g.sum(1), (g * (rows(x, slices) - scales[:, 2:3])).sum(1)
        put(before, g)

    def normalization_gradient(
        self, partial: Tensor, blocks: int, channels: int, count: int, scales: Tensor, *rest: Any
    ) -> None:
        weight, bias, shift, through = rest
        total, product = partial.sum(1).unbind(1)
        bias.copy_(total)
        if weight is not None:
            factor, _, mean, deviation = scales[0]
            weight.copy_(product[0] * deviation)
            slant = -factor * deviation.square() * product[0] / count
            through[0] = torch.stack([slant, -factor * total[0] / count - slant * mean])
        if shift is not None:
            shift.zero_()

    def group_gradient(
        self, partial: Tensor, blocks: int, channels: int, count: int, together: int, scales: Tensor, *rest: Any
    ) -> None:
        away, shares, shift, through = rest
        total, product = partial.sum(1).unbind(1)
        factor, _, mean, deviation = scales.unbind(1)
        shares.copy_(torch.stack([total, product * deviation], 1))
        level, slant = (
            -(factor * each).view(len(scales), -1, together).mean(2).repeat_interleave(together, 1) / count
            for each in (total, product)
        )
        slant = slant * deviation.square()
        through.copy_(torch.stack([slant, level - slant * mean], 1))
        if shift is not None:
            shift.copy_(factor * total + slant * away + count * level)

    def share_sums(self, shares: Tensor, images: int, channels: int, weight: Tensor, bias: Tensor) -> None:
        bias.copy_(shares[:, 0].sum(0))
        weight.copy_(shares[:, 1].sum(0))

    def backward(
        self, gradient: Tensor, x: Tensor, result: Tensor, scales: Tensor, through: Tensor, *rest: Any
    ) -> None:
        g = rows(gradient, len(scales)) * self.slope_of(scaled(x, scales), rest[-1])
        put(result, scales[:, :1] * g + through[:, :1] * rows(x, len(scales)) + through[:, 1:])

    def pool_forward(self, x: Tensor, y: Tensor, chosen: Any, place: Tensor, scales: Any, *rest: Any) -> None:
        z = torch.empty_like(x)
        put(z, rows(x) if scales is None else self.act(scaled(x, scales), rest[-1]))
        best, at = F.max_pool2d(z.float(), self.side, return_indices=True)
        y.copy_(best)
        if chosen is not None:
            chosen.copy_(x.flatten(2).gather(2, at.flatten(2)).view_as(at))
        width = x.shape[3]
        place.copy_(at // width % self.side * self.side + at % width % self.side)

    def pool_backward(self, gradient: Tensor, x: Any, chosen: Any, place: Tensor, result: Tensor, *rest: Any) -> None:
        scales, through, *_, slope = rest
        g = gradient.float()
        if scales is not None:
            towards = torch.empty_like(chosen, dtype=torch.float32)
            put(towards, scales[:, :1] * self.slope_of(scaled(chosen, scales), slope))
            g = g * towards
        down, across = g.shape[2:]
        place = place.long()
        line = torch.arange(down)[:, None] * self.side + place // self.side
        column = torch.arange(across) * self.side + place % self.side
        spread = torch.zeros(result.shape).flatten(2)
        spread.scatter_(2, (line * result.shape[3] + column).flatten(2), g.flatten(2))
        if through is not None:
            rest_of_it = torch.empty_like(result, dtype=torch.float32)
            put(rest_of_it, through[:, :1] * rows(x) + through[:, 1:])
            spread += rest_of_it.flatten(2)
        result.copy_(spread.view(result.shape))
