"""A diffusion UNet at 32x32 pixels: GroupNorm, SiLU, attention, and noise that is drawn on the device."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from harness.data import images
from harness.workloads.parts import Scale, Workload

TIMES = 1000  # steps from a picture to noise


def unet_workload(scale: Scale) -> Workload:
    """50,000 images of 32x32 in batches of 256; the network guesses the noise in each."""
    count, batch, width = scale.pick(50_000, 80, 10), scale.pick(256, 16, 4), scale.pick(64, 32, 8)
    pictures, _ = images(count, scale.seed)
    return Workload(
        name="unet",
        unit="images",
        dataset=TensorDataset(pictures),
        items=count,
        batch=batch,
        network=partial(UNet, width),
        optimize=partial(AdamW, lr=2e-4),
        objective=guess_noise,
        note=scale.note(f"{count:,} images in batches of {batch}, {width} wide"),
    )


def guess_noise(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mix each picture with noise for a random time step, and let the model guess the noise."""
    (pictures,) = batch
    noise = torch.randn_like(pictures)
    times = torch.randint(0, TIMES, (len(pictures),), device=pictures.device)
    angle = (times / TIMES * (math.pi / 2)).view(-1, 1, 1, 1)
    return F.mse_loss(model(angle.cos() * pictures + angle.sin() * noise, times), noise)


class UNet(nn.Module):
    """Down from 32x32 to 8x8 with a block on each level, and up again with two; attention at 16x16 and 8x8."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        wide, time = 2 * width, 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            [
                _UNetBlock(width, width, time),
                nn.Conv2d(width, width, 3, 2, 1),
                _UNetBlock(width, wide, time, attends=True),
                nn.Conv2d(wide, wide, 3, 2, 1),
                _UNetBlock(wide, wide, time, attends=True),
            ]
        )
        self.middle = nn.ModuleList([_UNetBlock(wide, wide, time, attends=True), _UNetBlock(wide, wide, time)])
        # What goes up gets what came down beside it: the outputs of `stem` and of `down`, the last first.
        self.up = nn.ModuleList(
            [
                _UNetBlock(2 * wide, wide, time, attends=True),
                _UNetBlock(2 * wide, wide, time, attends=True),
                nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(wide, wide, 3, padding=1)),
                _UNetBlock(2 * wide, wide, time, attends=True),
                _UNetBlock(wide + width, wide, time, attends=True),
                nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(wide, wide, 3, padding=1)),
                _UNetBlock(wide + width, width, time),
                _UNetBlock(2 * width, width, time),
            ]
        )
        self.head = nn.Sequential(nn.GroupNorm(_groups(width), width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, pictures: Tensor, times: Tensor) -> Tensor:
        time = self.time(_waves(times, self.width))
        x = self.stem(pictures)
        kept = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, _UNetBlock) else layer(x)
            kept.append(x)
        for layer in self.middle:
            x = layer(x, time)
        for layer in self.up:
            x = layer(torch.cat((x, kept.pop()), 1), time) if isinstance(layer, _UNetBlock) else layer(x)
        noise: Tensor = self.head(x)
        return noise


class _UNetBlock(nn.Module):
    """Two convolutions beside a short cut, told the time step between them; then attention, where it `attends`."""

    def __init__(self, inputs: int, outputs: int, time: int, *, attends: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(_groups(inputs), inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, outputs))
        self.second = nn.Sequential(
            nn.GroupNorm(_groups(outputs), outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.short: nn.Module = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)
        self.attention: nn.Module = _PixelAttention(outputs) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inside = self.first(x) + self.time(time)[:, :, None, None]
        result: Tensor = self.attention(self.second(inside) + self.short(x))
        return result


class _PixelAttention(nn.Module):
    """Every pixel attends to every pixel, in four heads."""

    HEADS = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_groups(width), width)
        self.all = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        count, width, height, across = x.shape
        heads = self.all(self.norm(x)).reshape(count, 3, self.HEADS, width // self.HEADS, height * across)
        query, key, value = heads.transpose(3, 4).unbind(1)
        seen = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = x + self.out(seen.transpose(2, 3).reshape(count, width, height, across))
        return result


def _groups(width: int) -> int:
    return math.gcd(width, 32) if width >= 32 else 4


def _waves(times: Tensor, width: int) -> Tensor:
    """Time steps as sines and cosines of `width // 2` frequencies each."""
    places = torch.arange(width // 2, device=times.device)
    angles = times[:, None] * torch.exp(places * (-math.log(10_000) / (width // 2)))
    return torch.cat((angles.sin(), angles.cos()), 1)
