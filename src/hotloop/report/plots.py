"""Plots of a `Report`, as the bytes of an image file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from hotloop.records import Report
from hotloop.report.document import Plot
from hotloop.report.words import metric

Form = Literal["png", "svg"]
FEW_POINTS = 75  # points of a curve below which there is nothing to smooth: a GPU's loss is only looked at now and then
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


def themed(title: str, alt: str, draw: Callable[[Theme, Form], bytes]) -> Plot:
    """A drawing for a page, by day and by night."""
    return Plot(title, alt, draw(LIGHT, "svg"), draw(DARK, "svg"))


def loss_curve(report: Report, form: Form = "png", theme: Theme = LIGHT) -> bytes:
    """The loss of each batch and its trend, the ends of the epochs, and below them the validation metric."""
    name = report.chief_metric
    figure = Figure(figsize=(9, 4.6), layout="constrained", facecolor=theme.background)
    if name is None:
        upper = figure.subplots()
        axes = [upper]
    else:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
        axes = [upper, lower]
        _draw_metric(lower, report, name, theme)
    _draw_loss(upper, report, theme)
    for each in axes:
        dress(each, theme)
    axes[-1].set_xlabel("epoch", color=theme.faint)
    _mark_epochs(axes, len(report.epochs), theme)
    return encoded(figure, form)


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


def smoothed(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """The mean over a window around each value, smaller towards both ends so that nothing is invented there.

    >>> smoothed([0.0, 3.0, 6.0, 3.0], 3).tolist()
    [0.0, 3.0, 4.0, 3.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    at = np.arange(len(values))
    half = np.minimum(np.minimum(at, len(values) - 1 - at), window // 2)
    means: NDArray[np.float64] = (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)
    return means


def _draw_loss(axes: Axes, report: Report, theme: Theme) -> None:
    axes.set_title("loss", loc="left", color=theme.text, fontsize=11, fontweight="bold")
    if not report.curve:
        axes.text(0.5, 0.5, "no batch was run", transform=axes.transAxes, ha="center", color=theme.faint)
        return
    at = _in_epochs(report)
    losses = [loss for _, loss in report.curve]
    if len(losses) < FEW_POINTS:
        trend = np.array(losses)
        axes.plot(at, losses, "o-", color=theme.loss, linewidth=1.8, markersize=3.5, label="training, some batches")
    else:
        trend = smoothed(losses, len(losses) // 25)
        axes.plot(at, losses, color=theme.loss, alpha=0.3, linewidth=1)
        axes.plot(at, trend, color=theme.loss, linewidth=2.2, solid_capstyle="round", label="training, smoothed")
    scored = [(epoch.number, epoch.metrics["loss"]) for epoch in report.epochs if "loss" in epoch.metrics]
    if scored:
        axes.plot(*zip(*scored, strict=True), "o", color=theme.metric, markersize=4.5, label="validation")
        axes.legend(frameon=False, labelcolor=theme.text, fontsize=9, loc="upper right")
    # One wild batch must not press the rest of the curve flat.
    top = max(float(np.quantile(losses, 0.995)) * 1.15, float(trend.max()) * 1.05, *(loss for _, loss in scored), 0.0)
    if min(losses) >= 0 and top > 0:
        axes.set_ylim(0, top)


def _draw_metric(axes: Axes, report: Report, name: str, theme: Theme) -> None:
    scored = [(epoch.number, epoch.metrics[name]) for epoch in report.epochs if name in epoch.metrics]
    numbers, values = zip(*scored, strict=True)
    axes.set_title(f"validation {name}", loc="left", color=theme.text, fontsize=11, fontweight="bold")
    axes.plot(numbers, values, "o-", color=theme.metric, linewidth=1.8, markersize=4.5)
    axes.annotate(
        metric(name, values[-1]),
        (numbers[-1], values[-1]),
        xytext=(0, -8),
        textcoords="offset points",
        ha="right",
        va="top",
        color=theme.metric,
        fontweight="bold",
        fontsize=11,
    )
    if "accuracy" in name.lower() and all(0 <= value <= 1 for value in values):
        axes.set_ylim(0, 1.08)
        axes.set_yticks([0, 0.5, 1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def _in_epochs(report: Report) -> NDArray[np.float64]:
    """Where each point of the curve lies, counted in epochs: by the share of the items that had gone by."""
    at = np.array([batch for batch, _ in report.curve], dtype=np.float64)
    largest = max((epoch.items for epoch in report.epochs), default=0)
    if not largest:
        return at
    # An epoch that Ctrl-C cut short holds fewer items, and so counts for less than one.
    length = sum(epoch.items for epoch in report.epochs) / largest
    at *= length / at[-1]
    return at


def _mark_epochs(axes: Sequence[Axes], epochs: int, theme: Theme) -> None:
    if not epochs:
        return
    for each in axes:
        each.set_xlim(0, epochs * 1.015)
        if epochs <= 40:
            for number in range(1, epochs + 1):
                each.axvline(number, color=theme.grid, linewidth=1, zorder=0)
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))


def dress(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor(theme.background)
    axes.grid(axis="y", color=theme.grid, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.faint, length=0, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
