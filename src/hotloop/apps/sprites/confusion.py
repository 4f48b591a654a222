"""What a classifier takes for what, as a picture."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from hotloop.report.plots import LIGHT, Theme, encoded


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
