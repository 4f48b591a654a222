"""DCGAN at 64x64 pixels: two networks, two optimizers, two objectives that alternate."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import TensorDataset

from harness.workloads.parts import Scale, Workload


def dcgan_workload(scale: Scale) -> Workload:
    """25,600 pictures in batches of 128; the tutorial's learning rate and betas."""
    count, batch, width = scale.pick(25_600, 256, 24), scale.pick(128, 32, 8), scale.pick(64, 16, 4)
    return Workload(
        name="dcgan",
        unit="images",
        dataset=TensorDataset(_faces(count, scale.seed)),
        items=count,
        batch=batch,
        network=partial(DCGAN, width),
        optimize=partial(Adam, lr=2e-4, betas=(0.5, 0.999)),
        objective={"discriminator": tell_apart, "generator": fool},
        note=scale.note(f"{count:,} images in batches of {batch}, {width} wide"),
    )


def tell_apart(model: "DCGAN", batch: list[Tensor]) -> Tensor:
    """The discriminator's objective: real pictures are real, drawn ones are not."""
    (real,) = batch
    with torch.no_grad():
        drawn = model(model.noise_for(real))
    return _loss(model.discriminator(real), 1.0) + _loss(model.discriminator(drawn), 0.0)


def fool(model: "DCGAN", batch: list[Tensor]) -> Tensor:
    """The generator's objective: what it draws is taken for real."""
    (real,) = batch
    return _loss(model.discriminator(model(model.noise_for(real))), 1.0)


def _loss(scores: Tensor, answer: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, answer))


class DCGAN(nn.Module):
    """A generator from 100 random numbers to a picture, and a discriminator from a picture to one score."""

    NOISE = 100

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *_upwards(self.NOISE, 8 * width, stride=1, padding=0),
            *_upwards(8 * width, 4 * width),
            *_upwards(4 * width, 2 * width),
            *_upwards(2 * width, width),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            *_downwards(width, 2 * width),
            *_downwards(2 * width, 4 * width),
            *_downwards(4 * width, 8 * width),
            nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False),
            nn.Flatten(),
        )
        self.apply(_begin)

    def forward(self, noise: Tensor) -> Tensor:
        pictures: Tensor = self.generator(noise)
        return pictures

    def noise_for(self, pictures: Tensor) -> Tensor:
        """New noise for as many pictures, on their device."""
        return torch.randn(len(pictures), self.NOISE, 1, 1, device=pictures.device)


def _upwards(inputs: int, outputs: int, stride: int = 2, padding: int = 1) -> list[nn.Module]:
    convolution = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def _downwards(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True)]


def _begin(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def _faces(count: int, seed: int) -> Tensor:
    """Smooth pictures of 3x64x64 between -1 and 1, with a little grain."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator) * 2 - 1
    pictures = F.interpolate(coarse, size=64, mode="bilinear")
    grain = (
        torch.randint(-16, 17, (64, 3, 64, 64), generator=generator) / 255
    )  # drawn once: the numbers would take long
    for first in range(0, count, len(grain)):
        pictures[first : first + len(grain)] += grain[: count - first]
    return pictures.clamp_(-1, 1)
