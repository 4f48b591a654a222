"""How near the workloads of a `Benchmark` come to the limits of the hardware, as a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from harness.charts import EXPERT, OURS, TUTORIAL, nothing, title
from harness.records import Benchmark, Score
from hotloop.printing.text import clipped, count, printable
from hotloop.report.plots import LIGHT, Form, Theme, dress, encoded

MEMORY = "bytes"  # the key of the memory's speed among the ceilings
MARKS: dict[str, dict[str, Any]] = {
    TUTORIAL: {"marker": "o", "markersize": 7, "markeredgewidth": 1.6},
    OURS: {"marker": "o", "markersize": 8, "markeredgewidth": 0},
    EXPERT: {"marker": "_", "markersize": 18, "markeredgewidth": 2.4},
}
WIDE, TALL = 6.85, 3.9  # inches of the roofline
Unit = tuple[float, str]  # what the operations per second are counted in, and its name


def roofline(benchmark: Benchmark, device: str, theme: Theme = LIGHT, form: Form = "png") -> bytes:
    """How near the workloads come to the limits of a device, as a picture: points under a roof, and the shares below.

    Operations and bytes are counted for plain PyTorch, not measured: a fused loop moves fewer bytes than are counted.
    """
    scores = [score for score in benchmark.scores if score.device == device and score.contestant in MARKS]
    scores = sorted((score for score in scores if score.flops and score.traffic and score.rate > 0), key=_intensity)
    roofs = {name: limit for name, limit in benchmark.ceilings.get(device, {}).items() if limit > 0}
    if not scores:
        return nothing(f"nothing on {printable(device)} has its operations counted", theme, form)
    foot = 0.95 + 0.26 * len({score.workload for score in scores})
    height = foot + TALL + 0.95
    figure = Figure(figsize=(9, height), facecolor=theme.background)
    axes = figure.add_axes((0.75 / 9, (foot + 0.55) / height, WIDE / 9, TALL / height))
    most = max([*_reached(scores), *(limit for name, limit in roofs.items() if name != MEMORY)])
    unit = (1e12, "TFLOP/s") if most >= 1e12 else (1e9, "GFLOP/s")
    _frame(axes, scores, roofs, unit, theme)
    _draw_roof(axes, roofs, unit, theme)
    _draw_points(axes, scores, unit, theme)
    title(axes, clipped(f"{unit[1]} on {device}, {benchmark.hardware}", 74), theme)
    _draw_shares(figure.add_axes((0, 0, 1, foot / height), xlim=(0, 9), ylim=(foot, 0)), scores, roofs, unit, theme)
    return encoded(figure, form)


def _frame(axes: Axes, scores: Sequence[Score], roofs: dict[str, float], unit: Unit, theme: Theme) -> None:
    """Logarithmic axes with room for every point and roof, and at the bottom for the names."""
    dress(axes, theme)
    at = [_intensity(score) for score in scores]
    heights = [*_reached(scores), *(limit for name, limit in roofs.items() if name != MEMORY)]
    ridge = max(heights) / roofs.get(MEMORY, max(heights) / max(at))
    low, high = min(heights) / unit[0], max(heights) / unit[0]
    axes.set(xscale="log", yscale="log", xlim=(min(at) / 4, max(*at, ridge) * 4))
    axes.set_ylim(low / 2 / (high / low) ** 0.16, high * 2)
    axes.grid(axis="both", which="major", color=theme.grid, linewidth=1)
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _figure(value)))
    axes.set_xlabel("operations per byte, counted for plain PyTorch", color=theme.faint, fontsize=9)


def _draw_roof(axes: Axes, roofs: dict[str, float], unit: Unit, theme: Theme) -> None:
    """What the memory allows, rising, and what the arithmetic allows in each precision, level."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    memory = roofs.get(MEMORY)
    levels = sorted((limit / unit[0], name) for name, limit in roofs.items() if name != MEMORY)
    line: dict[str, Any] = {"color": theme.faint, "linewidth": 1.4, "zorder": 1.5}
    label: dict[str, Any] = {"color": theme.faint, "fontsize": 8.5, "parse_math": False}
    inch = (top / bottom) ** (1 / TALL)
    places = spread_out([float(np.log(height / bottom) / np.log(inch)) for height, _ in levels], 0.16, TALL)
    for (height, name), place in zip(levels, places, strict=True):
        axes.plot([height * unit[0] / memory if memory else left, right], [height, height], **line)
        words = f" {printable(name)} {_figure(height)} {unit[1]}"
        axes.text(right, bottom * inch**place, words, va="center", **label)
    if memory:
        end = levels[-1][0] if levels else right * memory / unit[0]
        axes.plot([left, end * unit[0] / memory], [left * memory / unit[0], end], **line)
        start = max(left, bottom * unit[0] / memory) * (right / left) ** 0.03
        # The angle on paper of a line that rises tenfold for tenfold.
        angle = float(np.degrees(np.arctan2(TALL / np.log(top / bottom), WIDE / np.log(right / left))))
        height = start * memory / unit[0] * inch**0.05
        words = f"memory {count(memory / 1e9)} GB/s"
        axes.text(start, height, words, rotation=angle, rotation_mode="anchor", va="bottom", **label)


def _draw_points(axes: Axes, scores: Sequence[Score], unit: Unit, theme: Theme) -> None:
    """A column of marks for each workload, and its name at the bottom."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    labels = _labels(scores)
    groups = [[score for score in scores if score.workload == workload] for workload in labels]
    names = [label for label, _ in labels.values()]
    inch = (right / left) ** (1 / WIDE)
    wanted = [float(np.log(_intensity(group[0]) / left) / np.log(inch)) for group in groups]
    places = spread_out(wanted, [_width(name) for name in names], WIDE)
    shelf, bend = (bottom * (top / bottom) ** share for share in (0.06, 0.11))
    for name, group, place in zip(names, groups, places, strict=True):
        at, foot = _intensity(group[0]), left * inch**place
        line = [(at, max(_reached(group)) / unit[0]), (at, bend), (foot, shelf)]
        axes.plot(*zip(*line, strict=True), color=theme.faint, linewidth=0.8, alpha=0.7, zorder=1.6)
        axes.text(foot, shelf, name, ha="center", va="top", color=theme.text, fontsize=9, parse_math=False)
        for score in group:
            axes.plot([_intensity(score)], [_reached([score])[0] / unit[0]], **_mark(score.contestant, theme))


def _draw_shares(axes: Axes, scores: Sequence[Score], roofs: dict[str, float], unit: Unit, theme: Theme) -> None:
    """What each contestant reaches, and its share of the limits, in inches from the upper left."""
    axes.set_axis_off()
    best = max((name for name in roofs if name != MEMORY), key=lambda name: roofs[name], default=None)
    ends = {contestant: (3.05 + 2.3 * column, 4.2 + 2.3 * column) for column, contestant in enumerate(MARKS)}
    text: dict[str, Any] = {"va": "center", "parse_math": False}
    for contestant, (first, second) in ends.items():
        axes.plot([first - 0.8], [0.12], **_mark(contestant, theme) | {"markersize": 9})
        axes.text(first - 0.65, 0.12, contestant, color=theme.text, fontsize=9.5, fontweight="bold", **text)
        for end, words in ((first, unit[1]), (second, "GB/s")):
            axes.text(end, 0.36, words, color=theme.faint, fontsize=8, ha="right", **text)
    labels = _labels(scores)
    rows = {workload: 0.62 + 0.26 * row for row, workload in enumerate(labels)}
    for workload, (_, name) in labels.items():
        axes.text(0.15, rows[workload], name, color=theme.text, fontsize=9, **text)
    for score in scores:
        speed, traffic = _reached([score])[0], score.rate * (score.traffic or 0.0)
        cells = (
            _figure(speed / unit[0]) + _share(speed, roofs.get(best or "")),
            f"{_figure(traffic / 1e9)}{_share(traffic, roofs.get(MEMORY))}",
        )
        for end, words in zip(ends[score.contestant], cells, strict=True):
            axes.text(end, rows[score.workload], words, color=theme.text, fontsize=9, ha="right", **text)
    of = f"Shares are of {best} and of the memory's speed, as measured." if best else "No limit was measured."
    words = f"{of} Operations and bytes are counted, not measured: fused operations move fewer bytes."
    axes.text(0.15, axes.get_ylim()[0] - 0.16, printable(words), color=theme.faint, fontsize=8, **text)


def _labels(scores: Sequence[Score]) -> dict[str, tuple[str, str]]:
    """What each workload is called under the points and in the table: numbers where the names have no room."""
    workloads = list(dict.fromkeys(score.workload for score in scores))
    names = [clipped(workload, 24) for workload in workloads]
    fit = sum(map(_width, names)) < WIDE
    labels = [(name, name) if fit else (str(number), f"{number}  {name}") for number, name in enumerate(names, 1)]
    return dict(zip(workloads, labels, strict=True))


def _width(name: str) -> float:
    """Inches that a name takes in the roofline, with what keeps it from its neighbour."""
    return 0.075 * len(name) + 0.2


def _intensity(score: Score) -> float:
    """Operations per byte."""
    return (score.flops or 0.0) / (score.traffic or 1.0)


def _reached(scores: Sequence[Score]) -> list[float]:
    """Operations per second."""
    return [score.rate * (score.flops or 0.0) for score in scores]


def _share(value: float, limit: float | None) -> str:
    """How much of a limit, and nothing where that is not known.

    >>> _share(3.0, 200.0), _share(1.0, 1e6), _share(150.0, 100.0), _share(1.0, None)
    (' (1.5%)', ' (<0.1%)', ' (150%)', '')
    """
    if not limit:
        return ""
    share = 100 * value / limit
    return " (<0.1%)" if share < 0.1 else f" ({share:.{0 if share >= 9.95 else 1}f}%)"


def _figure(value: float) -> str:
    """A number with two or three digits that mean something.

    >>> _figure(0.0000123), _figure(3.456), _figure(783.2), _figure(4321.0)
    ('0.000012', '3.5', '783', '4,321')
    """
    return f"{value:,.0f}" if value >= 99.5 else np.format_float_positional(value, 2, fractional=False, trim="-")


def spread_out(wanted: Sequence[float], widths: float | Sequence[float], room: float) -> list[float]:
    """Where the middles of labels go, as near to where they are wanted (rising) as can be with none on another.

    >>> spread_out([1.0, 1.1, 5.0], 1.0, 10.0), spread_out([9.0, 9.9], [1.0, 2.0], 10.0)
    ([1.0, 2.0, 5.0], [7.5, 9.0])
    """
    half = np.broadcast_to(np.asarray(widths) / 2, (len(wanted),)).tolist()
    places = list(wanted)
    least = 0.0
    for number, place in enumerate(places):
        places[number] = max(place, least + half[number])
        least = places[number] + half[number]
    most = room
    for number, place in reversed(list(enumerate(places))):
        places[number] = min(place, most - half[number])
        most = places[number] - half[number]
    return places


def _mark(contestant: str, theme: Theme) -> dict[str, Any]:
    """How a contestant looks in the roofline; they lie close together, so the shapes do not cover one another."""
    colour = {TUTORIAL: theme.faint, OURS: theme.loss, EXPERT: theme.metric}[contestant]
    mark: dict[str, Any] = {"color": colour, "linestyle": "", "zorder": 3, **MARKS[contestant]}
    return mark | {"markerfacecolor": theme.background} if contestant == TUTORIAL else mark
