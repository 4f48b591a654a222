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


def rows(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).flatten(0, 2).float()


def put(target: Tensor | None, values: Tensor) -> None:
    if target is not None:
        count, channels, height, width = target.shape
        target.copy_(values.view(count, height, width, channels).permute(0, 3, 1, 2))


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

    def statistics(self, x: Tensor, partial: Tensor, count: int, groups: int) -> None:
        partial.zero_()
        away = rows(x) - rows(x)[0]
        partial[0, 0], partial[0, 1] = away.sum(0), away.square().sum(0)

    def normalization(self, partial: Tensor, blocks: int, channels: int, count: int, x: Tensor, *rest: Any) -> None:
        weight, bias, shift, running_mean, running_var, tracked, momentum, eps, scales = rest
        sums = partial[:blocks].sum(0) / count
        mean, variance = rows(x)[0] + sums[0], sums[1] - sums[0].square()
        factor = weight * (variance + eps).rsqrt()
        scales.copy_(torch.stack([factor, bias - mean * factor, mean, (variance + eps).rsqrt()]))
        running_mean.lerp_(mean if shift is None else mean + shift, momentum)
        running_var.lerp_(variance * count / (count - 1), momentum)
        tracked.add_(1)

    def shift_scales(self, bias: Tensor, channels: int, scales: Tensor) -> None:
        one = torch.ones_like(bias)
        scales.copy_(torch.stack([one, bias, one * 0, one]))

    def forward(self, x: Tensor, residual: Tensor | None, y: Tensor, scales: Tensor, *rest: Any) -> None:
        z = rows(x) * scales[0] + scales[1]
        put(y, self.act(z if residual is None else z + rows(residual), rest[-1]))

    def gradient_sums(
        self, gradient: Tensor, x: Tensor, y: Any, before: Any, scales: Tensor, partial: Tensor, *rest: Any
    ) -> None:
        g = rows(gradient) * self.slope_of(rows(x) * scales[0] + scales[1] if y is None else rows(y), rest[-1])
        partial.zero_()
        partial[0, 0], partial[0, 1] = g.sum(0), (g * (rows(x) - scales[2])).sum(0)
        put(before, g)

    def normalization_gradient(
        self, partial: Tensor, blocks: int, channels: int, count: int, scales: Tensor, *rest: Any
    ) -> None:
        weight, bias, shift, through = rest
        total, product = partial[:blocks].sum(0)
        bias.copy_(total)
        if weight is not None:
            weight.copy_(product * scales[3])
            slant = -scales[0] * scales[3].square() * product / count
            through.copy_(torch.stack([slant, -scales[0] * total / count - slant * scales[2]]))
        if shift is not None:
            shift.zero_()

    def backward(
        self, gradient: Tensor, x: Tensor, result: Tensor, scales: Tensor, through: Tensor, *rest: Any
    ) -> None:
        g = rows(gradient) * self.slope_of(rows(x) * scales[0] + scales[1], rest[-1])
        put(result, scales[0] * g + through[0] * rows(x) + through[1])

    def pool_forward(self, x: Tensor, y: Tensor, chosen: Any, place: Tensor, scales: Any, *rest: Any) -> None:
        z = torch.empty_like(x)
        put(z, rows(x) if scales is None else self.act(rows(x) * scales[0] + scales[1], rest[-1]))
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
            put(towards, scales[0] * self.slope_of(rows(chosen) * scales[0] + scales[1], slope))
            g = g * towards
        down, across = g.shape[2:]
        place = place.long()
        line = torch.arange(down)[:, None] * self.side + place // self.side
        column = torch.arange(across) * self.side + place % self.side
        spread = torch.zeros(result.shape).flatten(2)
        spread.scatter_(2, (line * result.shape[3] + column).flatten(2), g.flatten(2))
        if through is not None:
            rest_of_it = torch.empty_like(result, dtype=torch.float32)
            put(rest_of_it, through[0] * rows(x) + through[1])
            spread += rest_of_it.flatten(2)
        result.copy_(spread.view(result.shape))
