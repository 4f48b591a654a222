"""Pictures: ResNet-50 on JPEGs that workers decode and crop, and airbench's network, augmented on the device."""

import atexit
import functools
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

from harness.data import images
from harness.workloads.parts import Scale, Workload

CLASSES = 10
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as tutorials write them


def jpeg_workload(scale: Scale) -> Workload:
    """ResNet-50 on 4,000 JPEGs of 400x320; four workers decode, crop at random, flip and normalise."""
    count, batch = scale.pick(4_000, 48, 8), scale.pick(64, 8, 4)
    side, width = scale.pick(224, 64, 32), scale.pick(64, 16, 4)
    size = (400, 320) if not scale.quick else (60, 48)
    return Workload(
        name="jpeg",
        unit="images",
        dataset=JpegDataset(_folder_of_jpegs(count, size, scale.seed), side),
        items=count,
        batch=batch,
        network=partial(ResNet50, width=width),
        optimize=partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-4),
        loss=nn.CrossEntropyLoss(),
        workers=scale.pick(4, 2, 1),
        note=scale.note(f"{count:,} images cut to {side}x{side} in batches of {batch}, {width} wide"),
    )


class JpegDataset(Dataset[tuple[Tensor, int]]):
    """A folder of JPEGs whose names end in their class, each decoded, cropped at random, flipped and normalised."""

    def __init__(self, folder: Path, side: int) -> None:
        self.files = sorted(map(str, folder.iterdir()))
        self.labels = [int(Path(file).stem.rpartition("-")[2]) for file in self.files]
        self.side = side

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.files[index]) as file:
            picture = file.convert("RGB")
        cut = picture.resize((self.side, self.side), Image.Resampling.BILINEAR, box=_random_box(picture.size))
        if torch.rand(()) < 0.5:
            cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(cut)).permute(2, 0, 1).contiguous().float().div_(255)
        mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, DEVIATION))
        return pixels.sub_(mean).div_(deviation), self.labels[index]


def _random_box(size: tuple[int, int]) -> tuple[int, int, int, int]:
    """A part of 8% to 100% of the area with sides of 3:4 to 4:3, or all of it where ten draws give none that fits."""
    width, height = size
    for _ in range(10):
        area = width * height * (0.08 + 0.92 * float(torch.rand(())))
        ratio = math.exp(math.log(4 / 3) * (2 * float(torch.rand(())) - 1))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left = int(torch.randint(0, width - across + 1, ()))
            top = int(torch.randint(0, height - down + 1, ()))
            return left, top, left + across, top + down
    return 0, 0, width, height


@functools.cache
def _folder_of_jpegs(count: int, size: tuple[int, int], seed: int) -> Path:
    """Random textures, tinted by their class, in a temporary folder that goes when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="hotloop-bench-"))
    atexit.register(_remove, folder, os.getpid())
    tints = np.random.default_rng(seed).integers(40, 216, (CLASSES, 3))

    def write(number: int) -> None:
        dice = np.random.default_rng((seed, number))
        label = number % CLASSES
        coarse = dice.integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
        texture = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.float32)
        grain = dice.standard_normal((size[1], size[0], 1), np.float32) * 8
        pixels = (texture + tints[label]) / 2 + grain
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        picture.save(folder / f"{number:05}-{label}.jpg", quality=90)

    with ThreadPoolExecutor() as threads:
        list(threads.map(write, range(count)))
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not when a worker that was forked ends
        shutil.rmtree(folder, ignore_errors=True)


class ResNet50(nn.Module):
    """ResNet-50 as it is used for ImageNet."""

    def __init__(self, classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_normed(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                inside = width << stage
                blocks.append(_Bottleneck(inputs, inside, 2 if stage and number == 0 else 1))
                inputs = 4 * inside
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.stem(pictures)).mean((2, 3)))
        return scores


class _Bottleneck(nn.Module):
    """Narrow, 3x3, wide again, beside a short cut."""

    def __init__(self, inputs: int, inside: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inside
        self.convolutions = nn.Sequential(
            *_normed(inputs, inside, 1),
            nn.ReLU(inplace=True),
            *_normed(inside, inside, 3, stride),
            nn.ReLU(inplace=True),
            *_normed(inside, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.short: nn.Module = nn.Identity() if same else nn.Sequential(*_normed(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.short(x), inplace=True)


def _normed(inputs: int, outputs: int, side: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False), nn.BatchNorm2d(outputs)]


def airbench_workload(scale: Scale) -> Workload:
    """50,000 images of 32x32 in batches of 1,024, flipped and shifted at random on the device."""
    count, batch = scale.pick(50_000, 512, 48), scale.pick(1024, 128, 16)
    widths = (64, 256, 256) if not scale.quick else (8, 8, 8)
    pictures, labels = images(count, scale.seed)
    return Workload(
        name="airbench",
        unit="images",
        dataset=TensorDataset(pictures, labels),
        items=count,
        batch=batch,
        network=partial(AirbenchNet, _whitening(pictures[:5_000]), widths),
        optimize=partial(SGD, lr=0.1, momentum=0.85, nesterov=True, weight_decay=5e-4),
        loss=nn.CrossEntropyLoss(label_smoothing=0.2),
        device_transform=flip_and_shift,
        note=scale.note(f"{count:,} images in batches of {batch}"),
    )


def flip_and_shift(batch: list[Tensor]) -> list[Tensor]:
    """Flip half of the images and shift each by up to two pixels, mirrored at the edge, in one gather."""
    pictures, labels = batch
    count, side, device = len(pictures), pictures.shape[-1], pictures.device
    places = torch.arange(side, device=device)
    down, across = torch.randint(-2, 3, (2, count, 1), device=device)
    flipped = torch.rand(count, 1, device=device) < 0.5
    rows = _mirrored(places + down, side)
    columns = _mirrored(torch.where(flipped, side - 1 - places, places) + across, side)
    every = torch.arange(count, device=device)[:, None, None]
    moved = pictures[every, :, rows[:, :, None], columns[:, None, :]]  # (count, rows, columns, channels)
    return [moved.permute(0, 3, 1, 2).contiguous(), labels]


def _mirrored(places: Tensor, side: int) -> Tensor:
    return side - 1 - (side - 1 - places.abs()).abs()


class AirbenchNet(nn.Module):
    """A 2x2 whitening convolution that does not learn, then three groups of two 3x3 convolutions."""

    def __init__(self, whitening: Tensor, widths: Sequence[int] = (64, 256, 256), classes: int = 10) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, len(whitening), 2)
        self.whiten.weight = nn.Parameter(whitening.clone(), requires_grad=False)
        groups: list[nn.Module] = []
        inputs = len(whitening)
        for outputs in widths:
            groups += [
                *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.MaxPool2d(2)),
                *(nn.BatchNorm2d(outputs), nn.GELU()),
                *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.GELU()),
            ]
            inputs = outputs
        self.groups = nn.Sequential(*groups, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(inputs, classes, bias=False)

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.head(self.groups(F.gelu(self.whiten(pictures)))) / 9
        return scores


def _whitening(pictures: Tensor) -> Tensor:
    """Filters that give 2x2 patches a covariance of one, each with its negative."""
    patches = F.unfold(pictures, 2).transpose(1, 2).flatten(0, 1)
    values, vectors = torch.linalg.eigh(patches.T.cov())
    filters = (vectors / (values + 5e-4).sqrt()).T.reshape(-1, pictures.shape[1], 2, 2)
    return torch.cat((filters, -filters))
