"""`run_demo`: a first training on made-up data, five spiral arms in the plane, with a report and pictures of it."""

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop.device import Choice
from hotloop.errors import BadArgument
from hotloop.loop import Loop
from hotloop.placement import move, to_numpy
from hotloop.records import Report
from hotloop.report.folder import RunFolder, new_run
from hotloop.report.page import Picture, page
from hotloop.report.plane import Points, Stage, disc, strip
from hotloop.report.plots import loss_curve
from hotloop.report.words import metric
from hotloop.text import count, plural

ARMS = 5
TURNS = 1.25  # of each arm around the middle
NOISE = 0.024  # how far points stray from their arm
BATCH = 256
PEAK = 6e-3  # the learning rate climbs to this and falls again
FEWEST_POINTS, MOST_POINTS = 100, 10_000_000
EDGE = 1.05  # the pictures show the plane from -EDGE to EDGE
PIXELS = 320  # of the pictures' grid, each way
SHOWN = 400  # held-out points in a picture

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """What a person may set."""

    epochs: int
    points: int  # to train on; a quarter as many are held out
    seed: int

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise BadArgument(f"{self.epochs} epochs", fix="give --epochs a whole number of at least 1")
        if not FEWEST_POINTS <= self.points <= MOST_POINTS:
            least, most = count(FEWEST_POINTS), count(MOST_POINTS)
            raise BadArgument(f"{count(self.points)} points", fix=f"give --points a number from {least} to {most}")
        if not 0 <= self.seed < 2**63:
            raise BadArgument(f"seed {self.seed}", fix="give --seed a whole number from 0 to 2**63 - 1")

    def command(self, device: str) -> str:
        """The command that does this run again."""
        parts = ["hotloop", "demo", "--device", device, "--epochs", self.epochs, "--points", self.points]
        return shlex.join(str(part) for part in [*parts, "--seed", self.seed])


def run_demo(
    out: Path | None = None,
    *,
    epochs: int,
    points: int,
    seed: int,
    device: str | None = None,
    progress: bool | None = None,
    tell: Callable[[Choice], None] = lambda choice: None,
) -> tuple[Report, Path]:
    """Train on spirals and write a folder with the report, its page and the pictures.

    `tell` hears the device and the reason before the training starts. Ctrl-C ends the training early; the folder then
    holds what was done up to there.
    """
    demo = _Demo.prepare(Settings(epochs, points, seed), device)
    tell(demo.loop.choice)
    with new_run(out) as folder:
        report = demo.train(progress)
        demo.write(report, folder)
    return report, folder.path


def spirals(points: int, generator: torch.Generator) -> Data:
    """Points along spiral arms, as places [n, 2] and the arm of each.

    >>> places, arms = spirals(10, torch.Generator().manual_seed(0))
    >>> arms.tolist()
    [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    """
    arms = torch.arange(points) % ARMS
    radius = 0.07 + 0.91 * torch.rand(points, generator=generator).sqrt()
    angle = 2 * math.pi * (arms / ARMS + TURNS * radius)
    places = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return places + NOISE * torch.randn(points, 2, generator=generator), arms


class Waves(nn.Module):
    """A small network whose neurons are sine waves: spirals are easy for it, and it draws smooth edges."""

    def __init__(self, generator: torch.Generator, width: int = 96, depth: int = 3, pitch: float = 2.5) -> None:
        super().__init__()
        self.pitch = pitch  # how fine a pattern the first layer can see from the start
        sizes = [2, *[width] * depth, ARMS]
        self.layers = nn.ModuleList(nn.utils.skip_init(nn.Linear, a, b) for a, b in pairwise(sizes))
        for layer, inputs in zip(self.layers, sizes, strict=False):
            for weights in layer.parameters():  # as torch starts them, but from a generator of our own
                nn.init.uniform_(weights, -(inputs**-0.5), inputs**-0.5, generator=generator)

    def forward(self, places: Tensor) -> Tensor:
        *hidden, last = self.layers
        values = places * self.pitch
        for layer in hidden:
            values = torch.sin(layer(values))
        result: Tensor = last(values)
        return result


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Whether each point was put on its own arm; the mean is the accuracy."""
    return output.argmax(1) == target


@dataclass
class _Album:
    """The held-out batches; whenever an evaluation goes through them, the model's map of the plane is kept as well."""

    loader: DataLoader[Any]
    loop: Loop
    moments: frozenset[int]  # epochs to keep
    kept: dict[int, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        if self.loop.epoch in self.moments:
            self.kept[self.loop.epoch] = chances(self.loop.model, self.loop.device)
        yield from self.loader


@torch.inference_mode()
def chances(model: nn.Module, device: torch.device) -> Tensor:
    """How likely each arm is at each spot of the plane, as the model sees it: [pixels, pixels, arms]."""
    line = torch.linspace(-EDGE, EDGE, PIXELS)
    y, x = torch.meshgrid(line, line, indexing="ij")
    grid = move(torch.stack([x, y], dim=-1).reshape(-1, 2), device)
    output: Tensor = model(grid)
    return output.softmax(-1).reshape(PIXELS, PIXELS, ARMS).cpu()


@dataclass
class _Demo:
    """A run with everything in its place."""

    settings: Settings
    loop: Loop
    training: DataLoader[Any]
    held_out: Data
    album: _Album

    @classmethod
    def prepare(cls, settings: Settings, device: str | None) -> "_Demo":
        generator = torch.Generator().manual_seed(settings.seed)
        training = DataLoader(
            TensorDataset(*spirals(settings.points, generator)), batch_size=BATCH, shuffle=True, generator=generator
        )
        held_out = spirals(settings.points // 4, generator)
        model = Waves(generator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=PEAK, total_steps=settings.epochs * len(training)
        )
        loop = Loop(model, optimizer, nn.CrossEntropyLoss(), device=device, scheduler=schedule)
        judging = DataLoader(TensorDataset(*held_out), batch_size=1000, generator=torch.Generator())
        album = _Album(judging, loop, _moments(settings.epochs))
        return cls(settings, loop, training, held_out, album)

    def train(self, progress: bool | None) -> Report:
        return self.loop.fit(
            self.training,
            epochs=self.settings.epochs,
            validate=self.album,
            metrics={"accuracy": correct},
            progress=progress,
        )

    def write(self, report: Report, folder: RunFolder) -> None:
        """The report as data and as a page, and the pictures as files of their own."""
        stages, points = self._stages(report), self._points()
        command = self.settings.command(report.device)
        pictures = [
            Picture(disc(stage, points, EDGE), f"{stage.title}: {stage.detail}", "The plane, coloured by predicted arm")
            for stage in stages
        ]
        folder.write("loss.png", loss_curve(report))
        folder.write("spirals.png", strip(stages, points, EDGE))
        folder.write(
            "report.html",
            page(report, title="The demo: five spirals", lead=self._lead(), pictures=pictures, command=command),
        )
        folder.write_json("report.json", {**report.to_json(), "demo": {**vars(self.settings), "command": command}})

    def _lead(self) -> str:
        return (
            f"A small network ({plural(sum(p.numel() for p in self.loop.model.parameters()), 'parameter')}) learned "
            f"which of {ARMS} spiral arms a point of the plane belongs to, from {count(self.settings.points)} points. "
            f"It is judged by {count(len(self.held_out[0]))} points that it never saw."
        )

    def _stages(self, report: Report) -> list[Stage]:
        """The moments that were kept, and the end."""
        ends = {epoch.number: epoch for epoch in report.epochs}
        last = report.epochs[-1].number if report.epochs else 0
        kept = {**self.album.kept, last: chances(self.loop.model, self.loop.device)}
        stages = []
        for number, tensor in sorted(kept.items()):
            scores = ends[number].metrics if number in ends else {}
            detail = f"{metric('accuracy', scores['accuracy'])} of held-out points right" if scores else "stopped here"
            stages.append(Stage(f"epoch {number}" if number else "before training", detail, to_numpy(tensor)))
        return stages

    def _points(self) -> Points:
        places, arms = self.held_out
        return Points(to_numpy(places[:SHOWN]), to_numpy(arms[:SHOWN]))


def _moments(epochs: int) -> frozenset[int]:
    """The epochs after which to keep the map: the first, one early on while it still learns, the last.

    >>> sorted(_moments(12)), sorted(_moments(1))
    ([1, 4, 12], [1])
    """
    return frozenset({1, max(1, epochs // 3), epochs})
