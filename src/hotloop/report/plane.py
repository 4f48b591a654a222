"""A picture of what a classifier of points in the plane has learned: a disc in which every spot has the colour of the
class that the model sees there, dark where the model is not sure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch
from numpy.typing import NDArray

from hotloop.report.plots import encoded

Array = NDArray[np.float64]
COLOURS = ("#ff5d5d", "#ffb13d", "#2fd0a5", "#3f9bff", "#b06bff")
NIGHT = "#10131c"


@dataclass(frozen=True)
class Stage:
    """The model at one moment of its training."""

    title: str
    detail: str
    chances: Array  # [height, width, classes], from the lower left corner


@dataclass(frozen=True)
class Points:
    """Points in the plane with the class of each."""

    places: Array  # [n, 2]
    classes: NDArray[np.int64]  # [n]


def strip(stages: Sequence[Stage], points: Points, extent: float) -> bytes:
    """All stages side by side on a dark card, as a PNG."""
    width = 4.0 * len(stages)
    figure = Figure(figsize=(width, 4.75))
    figure.patch.set_alpha(0)
    figure.add_artist(_card(width, 4.75))
    for number, stage in enumerate(stages):
        left, side = (number + 0.04) / len(stages), 0.92 / len(stages)
        axes = figure.add_axes((left, 0.035, side, side * width / 4.75))
        _draw(axes, stage, points, extent)
        middle = (number + 0.5) / len(stages)
        figure.text(middle, 0.915, stage.title, ha="center", color="#f2f4f8", fontsize=15, fontweight="bold")
        figure.text(middle, 0.858, stage.detail, ha="center", color="#9aa3b2", fontsize=11.5)
    return encoded(figure, density=150)


def disc(stage: Stage, points: Points, extent: float) -> bytes:
    """One stage alone, without words, as a PNG."""
    figure = Figure(figsize=(4, 4))
    _draw(figure.add_axes((0.01, 0.01, 0.98, 0.98)), stage, points, extent)
    return encoded(figure, density=170, transparent=True)


def painted(chances: Array) -> Array:
    """The colour of each spot: the classes mixed by their chances, and the night where no class is likely.

    >>> painted(np.array([[[1.0, 0.0]]])).round(2).tolist()
    [[[1.0, 0.36, 0.36]]]
    """
    classes = chances.shape[-1]
    mixed = chances @ np.array([to_rgb(COLOURS[i % len(COLOURS)]) for i in range(classes)])
    guess = 1 / classes
    sure = np.clip((chances.max(-1, keepdims=True) - guess) / (1 - guess), 0, 1) ** 1.5
    colours: Array = np.array(to_rgb(NIGHT)) * (1 - sure) + mixed * sure
    return colours


def _draw(axes: Axes, stage: Stage, points: Points, extent: float) -> None:
    axes.set_axis_off()
    axes.set_xlim(-extent, extent)
    axes.set_ylim(-extent, extent)
    edge = Circle((0, 0), extent * 0.985, facecolor=NIGHT, edgecolor="#3a4152", linewidth=1)
    axes.add_patch(edge)
    box = (-extent, extent, -extent, extent)
    image = axes.imshow(painted(stage.chances), extent=box, origin="lower", interpolation="bicubic", zorder=2)
    image.set_clip_path(edge)
    colours = [COLOURS[i % len(COLOURS)] for i in points.classes]
    x, y = points.places.T
    axes.scatter(x, y, s=9, c=colours, edgecolors="white", linewidths=0.45, zorder=3, clip_path=edge)


def _card(width: float, height: float) -> FancyBboxPatch:
    """A card with round corners that fills the figure."""
    return FancyBboxPatch(
        (0, 0),
        1,
        1,
        boxstyle=f"round,pad=0,rounding_size={0.25 / width}",
        mutation_aspect=width / height,
        facecolor="#0b0d13",
        edgecolor="none",
        zorder=-1,
    )
