"""What pictures share, and a table of confusions: the bytes of an image file."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from hotloop.report.document import Plot

Form = Literal["png", "svg"]
DENSITY = 200  # dots per inch: twice what a plain screen shows


@dataclass(frozen=True)
class Theme:
    """The colours of a plot."""

    text: str
    faint: str
    grid: str
    loss: str
    metric: str
    background: str

    @property
    def dark(self) -> bool:
        return self.background < "#8"


LIGHT = Theme(text="#1f2430", faint="#6b7280", grid="#e7e9ee", loss="#e8590c", metric="#0b7285", background="#ffffff")
DARK = Theme(text="#e6e8ee", faint="#9aa3b2", grid="#2b303b", loss="#ff8a4c", metric="#4cc9d8", background="#171a21")


def themed(title: str, alt: str, draw: Callable[[Theme, Form], bytes], caption: str = "") -> Plot:
    """A drawing for a page, by day and by night."""
    return Plot(title, alt, draw(LIGHT, "svg"), draw(DARK, "svg"), caption)


def unit_for(n: float) -> tuple[float, str]:
    """The binary unit that suits a number of bytes.

    >>> unit_for(3 * 2**20)
    (1048576.0, 'MiB')
    """
    power = min(int(math.log(max(n, 1), 1024)), 4)
    return 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def confusion(counts: Sequence[Sequence[int]], names: Sequence[str], theme: Theme = LIGHT) -> bytes:
    """How many of each class (rows) were taken for which (columns), as a PNG; what is right lies on the diagonal."""
    table = np.asarray(counts, dtype=np.float64)
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    side = 1.6 + 0.42 * len(names)
    figure = Figure(figsize=(side, side), layout="constrained", facecolor=theme.background)
    axes = figure.subplots()
    ramp = LinearSegmentedColormap.from_list("shares", [theme.background, theme.metric])
    axes.imshow(shares, cmap=ramp, vmin=0, vmax=1)
    for row, column in np.argwhere(table > 0):
        dark = shares[row, column] > 0.5
        text = f"{int(table[row, column])}"
        colour = theme.background if dark else theme.text
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", color=theme.text)
    axes.set_yticks(range(len(names)), names, color=theme.text)
    axes.set_xlabel("taken for", color=theme.faint)
    axes.set_ylabel("is", color=theme.faint)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return encoded(figure, "png")


def encoded(figure: Figure, form: Form = "png") -> bytes:
    """A figure as the bytes of a file, without the date, so that the same run gives the same picture."""
    file = BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None}
    figure.savefig(file, format=form, dpi=DENSITY, metadata=metadata)
    return file.getvalue()


def dress(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor(theme.background)
    axes.grid(axis="y", color=theme.grid, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.faint, length=0, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
