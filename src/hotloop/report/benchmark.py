"""A `Benchmark` as a table and as pictures: who is how fast, how near to the hardware's limits, and how right."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from hotloop.records import Benchmark, Curves, Score
from hotloop.report.plots import FEW, LIGHT, Theme, _dress, encoded
from hotloop.report.tuning import DASH, TIMES, _short, half_spread, times
from hotloop.text import count, duration, printable

OURS, TUTORIAL, EXPERT = "hotloop", "tutorial", "expert"
PEERS = ("accelerate", "fabric", "lightning")
ORDER = {name: place for place, name in enumerate((TUTORIAL, *PEERS, OURS, EXPERT))}
HEADER = (
    "",
    "per\nsecond",
    "\n±",
    f"{TIMES}\ntutorial",
    f"{TIMES} best\npeer",
    f"{TIMES}\nexpert",
    "\nstart",
    "\nwhole",
)
MEMORY = "bytes"  # the key of the memory's speed among the ceilings
MARKS: dict[str, dict[str, Any]] = {
    TUTORIAL: {"marker": "o", "markersize": 7, "markeredgewidth": 1.6},
    OURS: {"marker": "o", "markersize": 8, "markeredgewidth": 0},
    EXPERT: {"marker": "_", "markersize": 18, "markeredgewidth": 2.4},
}
WIDE, TALL = 6.85, 3.9  # inches of the roofline
Unit = tuple[float, str]  # what the operations per second are counted in, and its name
LEGEND = (
    "Per second: the median, ± half the way from the slowest repeat to the fastest. Start: seconds until it runs. "
    "Whole: per second with the start counted in."
)


def scores_table(benchmark: Benchmark) -> Table:
    """Every score, by workload and device, and how it stands to the tutorial, the best peer and the expert."""
    outer = Table.grid()
    outer.add_column(overflow="fold")
    groups = _groups(benchmark)
    cells = {key: [list(_cells(score, scores)) for score in scores] for key, scores in groups.items()}
    columns = zip(*(row for rows in cells.values() for row in rows), strict=True)
    widths = [max(map(cell_len, column)) for column in columns]  # the same in every group, so that all of them align
    for number, (key, rows) in enumerate(cells.items()):
        inner = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=number == 0, header_style="dim")
        for name, width in zip(HEADER, widths, strict=True):
            least = max(width, *map(cell_len, name.split("\n")), 0)
            inner.add_column(name, justify="right" if name else "left", min_width=least, no_wrap=True)
        for row in rows:
            inner.add_row(*map(Text, row), style="bold green" if row[0] == OURS else "")
        heading = " · ".join((*key, groups[key][0].unit))
        outer.add_row(Text(printable(heading), style="bold"))
        outer.add_row(inner)
        outer.add_row("")
    for failure in benchmark.failures:
        outer.add_row(Text(f"did not run: {printable(failure)}", style="yellow"))
    outer.add_row(Text(LEGEND if cells else "no contestant was timed", style="dim"))
    return outer


def bars(benchmark: Benchmark, theme: Theme = LIGHT) -> bytes:
    """How fast each contestant is, a panel for each workload and device, as a PNG."""
    groups = _groups(benchmark)
    if not groups:
        return _nothing("no contestant was timed", theme)
    names = sorted({score.contestant for score in benchmark.scores}, key=_place)
    columns = min(2, len(groups))
    lines = -(-len(groups) // columns)
    height = 0.55 + lines * (0.6 + 0.26 * len(names))
    figure = Figure(figsize=(9, height), facecolor=theme.background)
    _pad(figure)
    panels = figure.subplots(lines, columns, squeeze=False)
    title = f"{_short(benchmark.hardware, 74)}: per second, and {TIMES} the tutorial's loop"
    figure.suptitle(title, x=0.015, ha="left", color=theme.faint, fontsize=9.5, parse_math=False)
    for number, panel in enumerate(panels.flat):
        if number < len(groups):
            (workload, device), scores = list(groups.items())[number]
            _title(panel, f"{workload} · {device}", theme)
            _draw_scores(panel, scores, names, theme)
            panel.set_yticks(range(len(names)), map(printable, names) if number % columns == 0 else [""] * len(names))
        else:
            panel.set_axis_off()
    return encoded(figure)


def roofline(benchmark: Benchmark, device: str, theme: Theme = LIGHT) -> bytes:
    """How near the workloads come to the limits of a device, as a PNG: points under a roof, and the shares below.

    Operations and bytes are counted for plain PyTorch, not measured: a fused loop moves fewer bytes than are counted.
    """
    scores = [score for score in benchmark.scores if score.device == device and score.contestant in MARKS]
    scores = sorted((score for score in scores if score.flops and score.traffic and score.rate > 0), key=_intensity)
    roofs = {name: limit for name, limit in benchmark.ceilings.get(device, {}).items() if limit > 0}
    if not scores:
        return _nothing(f"nothing on {printable(device)} has its operations counted", theme)
    foot = 0.95 + 0.26 * len({score.workload for score in scores})
    height = foot + TALL + 0.95
    figure = Figure(figsize=(9, height), facecolor=theme.background)
    axes = figure.add_axes((0.75 / 9, (foot + 0.55) / height, WIDE / 9, TALL / height))
    most = max([*_reached(scores), *(limit for name, limit in roofs.items() if name != MEMORY)])
    unit = (1e12, "TFLOP/s") if most >= 1e12 else (1e9, "GFLOP/s")
    _frame(axes, scores, roofs, unit, theme)
    _draw_roof(axes, roofs, unit, theme)
    _draw_points(axes, scores, unit, theme)
    _title(axes, _short(f"{unit[1]} on {device}, {benchmark.hardware}", 74), theme)
    _draw_shares(figure.add_axes((0, 0, 1, foot / height), xlim=(0, 9), ylim=(foot, 0)), scores, roofs, unit, theme)
    return encoded(figure)


def curves(curves: Curves, theme: Theme = LIGHT) -> bytes:
    """The losses of both loops, and below them their difference inside the noise of the tutorial's, as a PNG."""
    steps, tutorial, ours, noise = _arrays(curves)
    if not len(steps):
        return _nothing("no step was run", theme)
    figure = Figure(figsize=(9, 5), facecolor=theme.background)
    _pad(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1.4))
    dots: dict[str, Any] = {"marker": "o" if len(steps) < FEW else "", "markersize": 3}
    upper.plot(steps, tutorial, color=theme.metric, linewidth=4, alpha=0.45, label="the tutorial's loop")
    upper.plot(steps, ours, color=theme.loss, linewidth=1.3, label="hotloop", **dots)
    _title(upper, f"loss: {curves.workload} · {curves.device}", theme)
    _title(lower, _apart(curves), theme)
    if len(noise):
        # The largest around each step, for a band of single steps is a comb that nothing can be compared with.
        band = _largest_near(np.abs(noise), max(len(noise) // 25, 1))
        words = "noise: the tutorial's loop against itself"
        lower.fill_between(steps, -band, band, color=theme.metric, alpha=0.25, linewidth=0, label=words)
    lower.plot(steps, ours - tutorial, color=theme.loss, linewidth=1.3, **dots)
    lower.axhline(0, color=theme.faint, linewidth=0.8, zorder=1)
    for axes in (upper, lower):
        _dress(axes, theme)
        axes.margins(x=0.01)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, labelcolor=theme.text, fontsize=9, loc="upper right", ncols=2)
    low, high = lower.get_ylim()
    lower.set_ylim(low, high + 0.35 * (high - low))  # room for the legend
    lower.set_xlabel("update", color=theme.faint)
    lower.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    return encoded(figure)


def curve_figures(curves: Curves) -> dict[str, float]:
    """How far the hot loop's loss is from the tutorial's, and how far the tutorial's is from itself; NaN if unknown."""
    _, tutorial, ours, noise = _arrays(curves)
    figures = {}
    for name, apart in (("difference", ours - tutorial), ("noise", noise)):
        size, scale = np.abs(apart), np.abs(tutorial[: len(apart)])
        shares = size[scale > 0] / scale[scale > 0]
        figures[f"largest {name}"] = float(size.max()) if len(size) else float("nan")
        figures[f"mean relative {name}"] = float(shares.mean()) if len(shares) else float("nan")
    return figures


def _place(contestant: str) -> tuple[int, str]:
    """The order of the contestants: the tutorial first, strangers after the peers, then ours and the expert's."""
    return ORDER.get(contestant, ORDER[OURS] - 1), contestant


def _groups(benchmark: Benchmark) -> dict[tuple[str, str], list[Score]]:
    """The scores of each workload and device, in the order of the benchmark."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in benchmark.scores:
        groups.setdefault((score.workload, score.device), []).append(score)
    return {key: sorted(scores, key=lambda score: _place(score.contestant)) for key, scores in groups.items()}


def _best(scores: Sequence[Score], *contestants: str) -> float | None:
    """The highest rate among some contestants."""
    return max((score.rate for score in scores if score.contestant in contestants and score.rate > 0), default=None)


def _cells(score: Score, rivals: Sequence[Score]) -> Iterator[str]:
    yield printable(score.contestant)
    yield count(score.rate)
    yield half_spread(score.rate, score.low, score.high)
    for other in ((TUTORIAL,), PEERS if score.contestant == OURS else (), (EXPERT,)):
        rate = _best(rivals, *other)
        yield DASH if rate is None else times(score.rate / rate)
    yield duration(score.start)
    yield count(score.whole)


def _draw_scores(axes: Axes, scores: Sequence[Score], names: Sequence[str], theme: Theme) -> None:
    _dress(axes, theme)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=theme.grid, linewidth=1)
    tutorial = _best(scores, TUTORIAL)
    for score in scores:
        ours = score.contestant == OURS
        row = names.index(score.contestant)
        axes.barh(row, score.rate, height=0.66, color=theme.loss if ours else _pale(theme), linewidth=0)
        axes.plot([score.low, score.high], [row, row], color=theme.text, linewidth=1.1, alpha=0.7)
        axes.annotate(
            count(score.rate) if tutorial is None else times(score.rate / tutorial),
            (max(score.rate, score.high), row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=theme.loss if ours else theme.text,
            fontweight="bold" if ours else "normal",
        )
    for row in set(range(len(names))) - {names.index(score.contestant) for score in scores}:
        axes.annotate(DASH, (0, row), xytext=(5, 0), textcoords="offset points", va="center", color=theme.faint)
    axes.set_xlim(0, max(max(score.rate, score.high) for score in scores) * 1.2 or 1)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(axis="y", labelcolor=theme.text)
    axes.set_xlabel(printable(f"{scores[0].unit}/s"), color=theme.faint, fontsize=8.5, parse_math=False)


def _arrays(curves: Curves) -> tuple[NDArray[np.float64], ...]:
    """Steps, the tutorial's loss, ours, and the noise, as far as both loops went; what is not finite is NaN."""
    length = min(len(curves.steps), len(curves.tutorial), len(curves.hotloop))
    columns = (curves.steps, curves.tutorial, curves.hotloop, curves.again)
    arrays = [np.asarray(column, dtype=np.float64)[:length] for column in columns]
    steps, tutorial, ours, again = (np.where(np.isfinite(array), array, np.nan) for array in arrays)
    noise = again - tutorial if len(again) == length else np.empty(0)
    return steps, tutorial, ours, noise


def _largest_near(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The largest value in a window around each."""
    half = window // 2
    padded = np.pad(values, half, constant_values=0.0)
    largest: NDArray[np.float64] = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1).max(axis=1)
    return largest


def _apart(curves: Curves) -> str:
    """What the lower panel of the curves shows, with its figures."""
    figures = curve_figures(curves)
    words = "hotloop minus the tutorial's loop"
    largest, noise = figures["largest difference"], figures["largest noise"]
    if largest == 0:
        return f"{words}: the same to the bit"
    if not np.isfinite(largest):
        return words
    return f"{words}: at most {largest:.2g}" + (f", the noise at most {noise:.2g}" if np.isfinite(noise) else "")


def _frame(axes: Axes, scores: Sequence[Score], roofs: dict[str, float], unit: Unit, theme: Theme) -> None:
    """Logarithmic axes with room for every point and roof, and at the bottom for the names."""
    _dress(axes, theme)
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
    names = [_short(workload, 24) for workload in workloads]
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


def _mark(contestant: str, theme: Theme) -> dict[str, Any]:
    """How a contestant looks in the roofline; they lie close together, so the shapes do not cover one another."""
    colour = {TUTORIAL: theme.faint, OURS: theme.loss, EXPERT: theme.metric}[contestant]
    mark: dict[str, Any] = {"color": colour, "linestyle": "", "zorder": 3, **MARKS[contestant]}
    return mark | {"markerfacecolor": theme.background} if contestant == TUTORIAL else mark


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


def _pale(theme: Theme) -> tuple[float, ...]:
    """The colour of what does not stand out; solid, so that no grid shows through."""
    faint, background = np.array(to_rgb(theme.faint)), np.array(to_rgb(theme.background))
    return tuple(0.45 * faint + 0.55 * background)


def _pad(figure: Figure) -> None:
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.09)


def _title(axes: Axes, words: str, theme: Theme) -> None:
    title = printable(words)
    axes.set_title(title, loc="left", color=theme.text, fontsize=11, fontweight="bold", parse_math=False)


def _nothing(words: str, theme: Theme) -> bytes:
    """A picture that says why there is nothing on it."""
    figure = Figure(figsize=(9, 2), facecolor=theme.background)
    figure.text(0.5, 0.5, words, ha="center", va="center", color=theme.faint, parse_math=False)
    return encoded(figure)
