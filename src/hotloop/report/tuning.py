"""How a plan was found, as a picture, a table and a sentence."""

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from rich import box
from rich.table import Table
from rich.text import Text

from hotloop.plan import Trial, Tuning
from hotloop.printing.text import clipped, duration, plural, printable
from hotloop.report.plots import LIGHT, Form, Theme, dress, encoded
from hotloop.report.words import DASH, TIMES, UNKNOWN, times

# Inches of the picture, from left to right and from top to bottom.
WIDTH, EDGE, NAMES, BARS = 9.0, 0.15, 1.8, 3.75
STEP, WHY = BARS + 0.7, BARS + 0.87  # from the left of the bars: where the times of a step end and the reasons begin
HEAD, ROW, FOOT, LINE = 0.8, 0.31, 0.55, 0.165


@dataclass(frozen=True)
class _Bar:
    """One row of the picture: a bar from `start` to `end`, in times the plain loop."""

    kind: Literal["plain", "kept", "dropped", "plan"]
    name: str
    start: float
    end: float | None  # None where nothing was timed
    low: float | None
    high: float | None
    step: float | None
    why: str = ""

    @property
    def reach(self) -> list[float]:
        """The ends of everything that is drawn in the row."""
        return [value for value in (self.start, self.end, self.low, self.high) if value is not None]


def half_spread(middle: float | None, low: float | None, high: float | None) -> str:
    """Half the way from the lowest to the highest as a share of the middle, and nothing where one is not known.

    >>> half_spread(2.0, 1.9, 2.1), half_spread(2.0, None, None)
    ('5%', '')
    """
    return f"{(high - low) / 2 / middle:.0%}" if middle and low is not None and high is not None else ""


def tuning_words(tuning: Tuning) -> str:
    """What the tuning gave, in a sentence."""
    kept = [printable(trial.lever) for trial in tuning.trials if trial.verdict == "kept"]
    tried = sum(trial.verdict != "not tried" for trial in tuning.trials)
    spent = f"tuned in {duration(tuning.seconds)}"
    if kept and tuning.gain is not None:
        return f"{times(tuning.gain)} the plain loop: {', '.join(kept)}; {spent}"
    if kept:
        return f"kept, by how much was not timed: {', '.join(kept)}; {spent}"
    if tried:
        return f"the plain loop stays: none of {plural(tried, 'lever')} made it faster; {spent}"
    return f"the plain loop stays: no lever was tried; {spent}"


def tuning_table(tuning: Tuning) -> Table:
    """Every lever with what it gave and what became of it, from the plain loop to the plan."""
    table = Table(
        box=box.HORIZONTALS,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        border_style="dim",
        header_style="dim",
        caption="tier A: the same numbers · B: other rounding · C: other training",
        caption_justify="left",
    )
    table.add_column("lever", overflow="fold")
    table.add_column("tier", justify="center", no_wrap=True)
    table.add_column(TIMES, justify="right", no_wrap=True)
    table.add_column("±", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("why", overflow="fold")
    table.add_row("plain loop", "", times(1.0), "", duration(tuning.plain_step), end_section=True)
    styles = {"kept": "bold green", "dropped": "", "not tried": "dim"}
    for number, trial in enumerate(tuning.trials, 1):
        cells = [Text(cell, style="dim" if trial.verdict == "not tried" else "") for cell in cells_of(trial)]
        table.add_row(*cells, style=styles[trial.verdict], end_section=number == len(tuning.trials))
    spent = f"tuned in {duration(tuning.seconds)}"
    table.add_row("the plan", "", times(tuning.gain), "", duration(tuning.step), "", spent, style="bold")
    return table


def waterfall(tuning: Tuning, theme: Theme = LIGHT, form: Form = "png") -> bytes:
    """From the plain loop to the plan, a row for each lever that was tried, as a picture.

    The axis is logarithmic and begins at 1: wherever a bar begins, it is as long as its lever's gain is large.
    """
    rows = list(_rows(tuning))
    caption = _untried(tuning)
    body, foot = ROW * len(rows), FOOT + LINE * len(caption)
    height = HEAD + body + foot
    figure = Figure(figsize=(WIDTH, height), facecolor=theme.background)
    axes = figure.add_axes((NAMES / WIDTH, foot / height, BARS / WIDTH, body / height))
    left, right = _range(rows)
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _ground(axes, theme)
    for number, row in enumerate(rows):
        _draw_bar(axes, number, row, theme)
        _write_columns(axes, number, row, theme)
    _link(axes, rows, theme)
    _head(figure, tuning, height, theme)
    words = "\n".join(caption)
    figure.text(EDGE / WIDTH, 0.1 / height, words, color=theme.faint, fontsize=8, linespacing=1.45, parse_math=False)
    return encoded(figure, form)


def cells_of(trial: Trial) -> Iterator[str]:
    """A lever as a row of the table; what was not timed is a dash."""
    yield printable(trial.lever)
    yield trial.tier
    yield DASH if trial.gain is None else times(trial.gain)
    yield half_spread(trial.gain, trial.low, trial.high)
    yield _dash(trial.step)
    yield trial.verdict
    yield printable(trial.why)


def _rows(tuning: Tuning) -> Iterator[_Bar]:
    level = 1.0
    yield _Bar("plain", "plain loop", level, level, None, None, tuning.plain_step)
    for trial in tuning.trials:
        if trial.verdict == "not tried":
            continue
        gain, low, high = (_positive(value) for value in (trial.gain, trial.low, trial.high))
        end, lowest, highest = (None if value is None else level * value for value in (gain, low, high))
        why = "" if trial.verdict == "kept" else clipped(trial.why, 300)
        yield _Bar(trial.verdict, clipped(trial.lever, 24), level, end, lowest, highest, trial.step, why)
        if trial.verdict == "kept" and end is not None:
            level = end
    yield _Bar("plan", "the plan", 1.0, _positive(tuning.gain), None, None, tuning.step)


def _untried(tuning: Tuning) -> list[str]:
    """The levers that were not tried, by reason, in lines that fit the picture."""
    by_reason: dict[str, list[str]] = {}
    for trial in tuning.trials:
        if trial.verdict == "not tried":
            by_reason.setdefault(clipped(trial.why, 90), []).append(clipped(trial.lever, 24))
    parts = [f"{', '.join(levers)} ({why})" if why else ", ".join(levers) for why, levers in by_reason.items()]
    return textwrap.wrap(f"not tried: {'; '.join(parts)}", 135) if parts else []


def _range(rows: list[_Bar]) -> tuple[float, float]:
    """The ends of the axis, with room for words after the bars; one that goes far to the left is cut off."""
    reach = [value for row in rows for value in row.reach]
    most = max(*reach, 1.1)
    least = max(min(reach), 1 / 3, most**-0.6)
    span = most / least
    return least / span**0.03, most * span**0.22


def _ground(axes: Axes, theme: Theme) -> None:
    """The axis of the bars, and the line of the plain loop."""
    dress(axes, theme)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=theme.grid, linewidth=1)
    axes.axvline(1, color=theme.faint, linewidth=1)
    axes.tick_params(labelsize=8, pad=5)
    axes.xaxis.set_major_locator(FixedLocator(_ticks(*axes.get_xlim())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{TIMES}"))
    axes.set_yticks([])


def _ticks(left: float, right: float) -> list[float]:
    """Round numbers that lie well apart on a logarithmic axis."""
    if right / left < 2.5:
        return [float(value) for value in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(left, right) if value > 0]
    firsts = (1, 2, 5) if right / left < 2000 else (1,)
    exponents = range(math.floor(math.log10(left)), math.ceil(math.log10(right)) + 1)
    return [first * 10.0**exponent for exponent in exponents for first in firsts]


def _draw_bar(axes: Axes, number: int, row: _Bar, theme: Theme) -> None:
    colour = {"plain": theme.faint, "kept": theme.loss, "dropped": theme.faint, "plan": theme.metric}[row.kind]
    if row.end is None:
        words, end = "not timed", row.start
    else:
        words, end = times(row.end / row.start), row.end
        alpha = 0.4 if row.kind == "dropped" else 1.0
        axes.barh(number, end - row.start, left=row.start, height=0.62, color=colour, alpha=alpha, linewidth=0)
    if row.low is not None and row.high is not None:
        axes.plot([row.low, row.high], [number, number], color=theme.text, linewidth=1, alpha=0.6)
    if row.end is not None and row.end < axes.get_xlim()[0]:
        words = f"← {words}"
    weight = "normal" if row.kind in {"plain", "dropped"} else "bold"
    axes.annotate(
        words,
        (max(row.start, end, row.high or 0.0), number),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontsize=9,
        fontweight=weight,
    )


def _write_columns(axes: Axes, number: int, row: _Bar, theme: Theme) -> None:
    """The lever's name at the left of the bars; the time of a step and the reason at their right."""
    colour = theme.faint if row.kind == "dropped" else theme.text
    weight = "bold" if row.kind == "plan" else "normal"
    why = "\n".join(textwrap.wrap(row.why, 42, max_lines=2, placeholder="…"))
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "parse_math": False}
    axes.text(-0.12 / BARS, number, row.name, ha="right", color=colour, fontsize=9.5, fontweight=weight, **place)
    axes.text(STEP / BARS, number, _dash(row.step), ha="right", color=colour, fontsize=9, fontweight=weight, **place)
    axes.text(WHY / BARS, number, why, ha="left", color=theme.faint, fontsize=7.5, **place)


def _link(axes: Axes, rows: list[_Bar], theme: Theme) -> None:
    """A thin line from the end of each bar that was kept to where the next one begins."""
    for number, (row, below) in enumerate(pairwise(rows)):
        at = row.start if row.kind == "dropped" or row.end is None else row.end
        if below.kind != "plan":
            axes.plot([at, at], [number, number + 1], color=theme.faint, linewidth=0.8, alpha=0.7, zorder=0.9)


def _head(figure: Figure, tuning: Tuning, height: float, theme: Theme) -> None:
    gain = f"{times(tuning.gain)} the plain loop" if tuning.gain is not None else "gain unknown"
    title = f"{clipped(tuning.model, 40)} on {clipped(tuning.device_name or UNKNOWN, 40)}: {gain}"
    top = 1 - 0.16 / height
    figure.text(EDGE / WIDTH, top, title, color=theme.text, fontsize=12, fontweight="bold", va="top", parse_math=False)
    below = 1 - 0.45 / height
    small: dict[str, Any] = {"color": theme.faint, "fontsize": 8, "va": "top"}
    figure.text(EDGE / WIDTH, below, f"times as fast; tuned in {duration(tuning.seconds)}", **small)
    figure.text((NAMES + STEP) / WIDTH, below, "step", ha="right", **small)
    if any(trial.verdict == "dropped" for trial in tuning.trials):
        figure.text((NAMES + WHY) / WIDTH, below, "why it was dropped", **small)


def _dash(seconds: float | None) -> str:
    return DASH if seconds is None else duration(seconds)


def _positive(value: float | None) -> float | None:
    """What can lie on a logarithmic axis."""
    return value if value is not None and math.isfinite(value) and value > 0 else None
