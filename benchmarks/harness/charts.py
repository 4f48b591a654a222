"""A `Benchmark` as a table and as pictures: who is how fast, and how right."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from harness.records import DEFAULT, Benchmark, Curves, EndToEnd, Score, WholeRun
from hotloop.printing.text import clipped, count, duration, printable
from hotloop.report.plots import LIGHT, Form, Theme, dress, encoded
from hotloop.report.words import DASH, TIMES, half_spread, times

FEW_POINTS = 75  # of a curve, each of which is marked
OURS, TUTORIAL, CAREFUL, EXPERT = "hotloop", "tutorial", "careful", "expert"
QUICK = ("A quick run.", "Its sizes are tiny, to see that it works: these are no figures to quote.")
PEERS = ("accelerate", "fabric", "lightning", "trainer")
ORDER = {name: place for place, name in enumerate((TUTORIAL, CAREFUL, *PEERS, OURS, EXPERT))}
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
PLAIN_HEADER = [" ".join(name.split()) for name in HEADER]
LEGEND = (
    "Per second: the median, ± half the way from the slowest repeat to the fastest. Start: seconds until it runs. "
    "Whole: per second with the start counted in."
)

WHOLE_LEGEND = (
    "Times the tutorial's loop. Default: the wall clock of a whole `fit` in which nothing was said, in runs that take "
    "the tutorial's loop so long; trials, captures and compilation are counted. By hand: the best of the plans that "
    "are written down, counted in the same way. The others: their rate once they run."
)


def scores_table(benchmark: Benchmark) -> Table:
    """Every score, by workload and device, and how it stands to the tutorial, the best peer and the expert."""
    outer = Table.grid()
    outer.add_column(overflow="fold")
    groups = groups_of(benchmark)
    cells = {key: [list(cells_of(score, scores)) for score in scores] for key, scores in groups.items()}
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
    if benchmark.quick:
        outer.add_row(Text(" ".join(QUICK), style="yellow"))
    return outer


def end_to_end_table(benchmark: Benchmark) -> Table:
    """What a person gets who says nothing: a line of ratios for each workload, and below it the plan and the losses."""
    outer = Table.grid()
    outer.add_column(overflow="fold")
    inner = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    header, rows = end_to_end_cells(benchmark)
    for number, name in enumerate(header[:-1]):
        ours = name.startswith(DEFAULT)
        inner.add_column(
            name.replace(", ", ",\n"),
            justify="right" if number > 1 else "left",
            style="bold green" if ours else "",
            no_wrap=True,
        )
    for row in rows:
        inner.add_row(*map(Text, row[:-1]))
    if rows:
        outer.add_row(inner)
        outer.add_row("")
    for row in rows:
        outer.add_row(Text(f"{row[0]}: {row[-1]}", style="dim"))
    for failure in failures_of(benchmark):
        outer.add_row(Text(f"did not run: {printable(failure)}", style="yellow"))
    outer.add_row(Text(WHOLE_LEGEND if rows else "nothing was timed", style="dim"))
    if benchmark.quick:
        outer.add_row(Text(" ".join(QUICK), style="yellow"))
    return outer


def end_to_end_cells(benchmark: Benchmark) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and a row for each workload; columns that nobody has a figure for are left out."""
    every = benchmark.end_to_end
    peers = list(dict.fromkeys(name for row in every for name in row.peers))
    runs = [run for row in every for run in row.runs]
    kinds = dict.fromkeys((run.length, run.warm) for run in runs if run.given == DEFAULT)
    hand = dict.fromkeys((run.length, run.warm) for run in runs if run.given != DEFAULT)
    several = len({row.device for row in every}) > 1
    header = ["workload", "tutorial, per second", *peers]
    header += [f"{DEFAULT}, {length:g} s{' warm' * warm}" for length, warm in kinds]
    header += [f"by hand, {length:g} s{' warm' * warm}" for length, warm in hand]
    header.append("plan, and loss in the same epoch")
    rows = []
    for row in every:
        cells = [f"{row.workload} · {row.device}" if several else row.workload, f"{count(row.rate)} {row.unit}"]
        cells += [times(row.peers[name] / row.rate) if name in row.peers else DASH for name in peers]
        cells += [_gain(row.default(length, warm=warm)) for length, warm in kinds]
        cells += [_gain(row.best_by_hand(length, warm=warm)) for length, warm in hand]
        rows.append([printable(cell) for cell in (*cells, _plan_and_loss(row))])
    return header, rows


def _gain(run: WholeRun | None) -> str:
    return DASH if run is None else times(run.gain)


def _plan_and_loss(row: EndToEnd) -> str:
    """The plan at the end of the longest run without one, its epoch, and its loss beside the tutorial's."""
    runs = [run for run in row.runs if run.given == DEFAULT and not run.warm]
    if not runs:
        return DASH
    longest = max(runs, key=lambda run: run.length)
    said = [longest.words]
    if longest.epoch is not None:
        said.append(f"{duration(longest.epoch)} an epoch at the end")
    losses = row.last_losses(longest)
    if losses is not None:
        epoch, ours, theirs = losses
        said.append(f"loss in epoch {epoch:,}: {ours:.4g}, the tutorial's {theirs:.4g}")
    return "; ".join(said)


def failures_of(benchmark: Benchmark) -> list[str]:
    """What did not run, and why."""
    return [*benchmark.failures, *(failure for row in benchmark.end_to_end for failure in row.failures)]


def bars(benchmark: Benchmark, theme: Theme = LIGHT, form: Form = "png") -> bytes:
    """How fast each contestant is, a panel for each workload and device, as a picture."""
    groups = groups_of(benchmark)
    if not groups:
        return nothing("no contestant was timed", theme, form)
    names = sorted({score.contestant for score in benchmark.scores}, key=_place)
    columns = min(2, len(groups))
    lines = -(-len(groups) // columns)
    height = 0.55 + lines * (0.6 + 0.26 * len(names))
    figure = Figure(figsize=(9, height), facecolor=theme.background)
    _pad(figure)
    panels = figure.subplots(lines, columns, squeeze=False)
    quick = "quick run, not to be quoted: " if benchmark.quick else ""
    above = f"{quick}{clipped(benchmark.hardware, 74 - len(quick))}: per second, and {TIMES} the tutorial's loop"
    figure.suptitle(above, x=0.015, ha="left", color=theme.faint, fontsize=9.5, parse_math=False)
    for number, panel in enumerate(panels.flat):
        if number < len(groups):
            (workload, device), scores = list(groups.items())[number]
            title(panel, f"{workload} · {device}", theme)
            _draw_scores(panel, scores, names, theme)
            panel.set_yticks(range(len(names)), map(printable, names) if number % columns == 0 else [""] * len(names))
        else:
            panel.set_axis_off()
    return encoded(figure, form)


def curves(curves: Curves, theme: Theme = LIGHT, form: Form = "png") -> bytes:
    """The losses of both loops, and below them their difference inside the noise of the tutorial's, as a picture."""
    steps, tutorial, ours, noise = _arrays(curves)
    if not len(steps):
        return nothing("no step was run", theme, form)
    figure = Figure(figsize=(9, 5), facecolor=theme.background)
    _pad(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1.4))
    dots: dict[str, Any] = {"marker": "o" if len(steps) < FEW_POINTS else "", "markersize": 3}
    upper.plot(steps, tutorial, color=theme.metric, linewidth=4, alpha=0.45, label="the tutorial's loop")
    upper.plot(steps, ours, color=theme.loss, linewidth=1.3, label="hotloop", **dots)
    title(upper, f"loss: {curves.workload} · {curves.device}", theme)
    title(lower, _apart(curves), theme)
    if len(noise):
        # The largest around each step, for a band of single steps is a comb that nothing can be compared with.
        band = _largest_near(np.abs(noise), max(len(noise) // 25, 1))
        words = "noise: the tutorial's loop against itself"
        lower.fill_between(steps, -band, band, color=theme.metric, alpha=0.25, linewidth=0, label=words)
    lower.plot(steps, ours - tutorial, color=theme.loss, linewidth=1.3, **dots)
    lower.axhline(0, color=theme.faint, linewidth=0.8, zorder=1)
    for axes in (upper, lower):
        dress(axes, theme)
        axes.margins(x=0.01)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, labelcolor=theme.text, fontsize=9, loc="upper right", ncols=2)
    low, high = lower.get_ylim()
    lower.set_ylim(low, high + 0.35 * (high - low))  # room for the legend
    lower.set_xlabel("update", color=theme.faint)
    lower.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    return encoded(figure, form)


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


def groups_of(benchmark: Benchmark) -> dict[tuple[str, str], list[Score]]:
    """The scores of each workload and device, in the order of the benchmark."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in benchmark.scores:
        groups.setdefault((score.workload, score.device), []).append(score)
    return {key: sorted(scores, key=lambda score: _place(score.contestant)) for key, scores in groups.items()}


def _best(scores: Sequence[Score], *contestants: str) -> float | None:
    """The highest rate among some contestants."""
    return max((score.rate for score in scores if score.contestant in contestants and score.rate > 0), default=None)


def cells_of(score: Score, rivals: Sequence[Score]) -> Iterator[str]:
    """A score as a row of the table."""
    yield printable(score.contestant)
    yield count(score.rate)
    yield half_spread(score.rate, score.low, score.high)
    for other in ((TUTORIAL,), PEERS if score.contestant == OURS else (), (EXPERT,)):
        rate = _best(rivals, *other)
        yield DASH if rate is None else times(score.rate / rate)
    yield duration(score.start)
    yield count(score.whole)


def _draw_scores(axes: Axes, scores: Sequence[Score], names: Sequence[str], theme: Theme) -> None:
    dress(axes, theme)
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


def _pale(theme: Theme) -> tuple[float, ...]:
    """The colour of what does not stand out; solid, so that no grid shows through."""
    faint, background = np.array(to_rgb(theme.faint)), np.array(to_rgb(theme.background))
    return tuple(0.45 * faint + 0.55 * background)


def _pad(figure: Figure) -> None:
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.09)


def title(axes: Axes, words: str, theme: Theme) -> None:
    axes.set_title(printable(words), loc="left", color=theme.text, fontsize=11, fontweight="bold", parse_math=False)


def nothing(words: str, theme: Theme, form: Form = "png") -> bytes:
    """A picture that says why there is nothing on it."""
    figure = Figure(figsize=(9, 2), facecolor=theme.background)
    figure.text(0.5, 0.5, words, ha="center", va="center", color=theme.faint, parse_math=False)
    return encoded(figure, form)
