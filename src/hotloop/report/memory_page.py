"""Where the memory of a step went, as a picture over time; read from the plain data of a `Track`."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hotloop.files.whole import write_whole
from hotloop.printing.text import clipped, size
from hotloop.report.plots import LIGHT, Form, Theme, dress, encoded
from hotloop.report.words import UNKNOWN

PHASES = ("between", "forward", "backward", "optimizer")
PURPLE = {False: "#7048b6", True: "#b79cf5"}  # of the optimizer, on a light and on a dark ground
OUTSIDE = "outside any module"

Data = dict[str, Any]  # what `Track.to_json()` gives, also after a trip through a file


def peak_words(data: Data) -> str:
    """The finding in a sentence.

    >>> peak_words({"peak": 432013312, "at": {"phase": "backward", "module": "blocks.3"}})
    'peak 412.0 MiB in backward of blocks.3'
    """
    phase, module = data["at"]["phase"], data["at"]["module"]
    if phase == "between":
        where = "between the steps"
    elif phase == "optimizer":
        where = "in the optimizer"
    else:
        where = f"in {phase} of {clipped(module, 44)}" if module else f"in {phase}, {OUTSIDE}"
    return f"peak {size(data['peak'])} {where}"


def timeline(data: Data, path: Path | str, theme: Theme = LIGHT) -> None:
    """Draw the live bytes over time with the phases as coloured bands, into a PNG, or an SVG if the name ends so."""
    target = Path(path)
    write_whole(target, timeline_picture(data, "svg" if target.suffix.lower() == ".svg" else "png", theme))


def timeline_picture(data: Data, form: Form = "png", theme: Theme = LIGHT) -> bytes:
    """The same, as the bytes of the file."""
    engine = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)
    figure = Figure(figsize=(9, 4.7), layout=engine, facecolor=theme.background)
    axes = figure.subplots()
    points = [(float(at), float(live), str(phase)) for at, live, phase in data["timeline"]]
    dress(axes, theme)
    if points and data["peak"] > 0:
        _draw_curve(axes, points, theme)
        _draw_peak(axes, data, points, theme)
        _scale(axes, data, points, theme)
    else:
        axes.text(0.5, 0.5, "no tensor was seen", transform=axes.transAxes, ha="center", color=theme.faint)
        axes.set_axis_off()
    _head(figure, axes, data, {phase for *_, phase in points}, theme)
    return encoded(figure, form)


def _draw_curve(axes: Axes, points: Sequence[tuple[float, float, str]], theme: Theme) -> None:
    """The live bytes as a line, the room below it and a faint band behind it in the colour of the phase."""
    for phase, begin, end in _bands(points):
        part = [(at, live) for at, live, _ in points[begin : end + 1]]
        at, live = zip(*part, strict=True)
        colour = _colour(phase, theme)
        axes.axvspan(at[0], at[-1], color=colour, alpha=0.07, linewidth=0)
        axes.fill_between(at, live, step="post", color=colour, alpha=0.45, linewidth=0)
        axes.step(at, live, where="post", color=colour, linewidth=1.3, solid_joinstyle="round")


def _bands(points: Sequence[tuple[float, float, str]]) -> Iterator[tuple[str, int, int]]:
    """Each stretch in one phase, with the numbers of its first point and of the one where the next begins."""
    begin = 0
    for phase, stretch in groupby(points, key=lambda point: point[2]):
        end = begin + sum(1 for _ in stretch)
        yield phase, begin, min(end, len(points) - 1)
        begin = end


def _draw_peak(axes: Axes, data: Data, points: Sequence[tuple[float, float, str]], theme: Theme) -> None:
    first, last = points[0][0], points[-1][0]
    at, peak = max(points, key=lambda point: point[1])[0], float(data["peak"])
    place = (at - first) / (last - first) if last > first else 0.5
    words = [size(peak)]
    words += [clipped(data["at"]["module"], 40)] if data["at"]["module"] else []
    axes.plot([at], [peak], "o", color=theme.text, markersize=5, zorder=5)
    axes.annotate(
        "\n".join(words),
        (at, peak),
        xytext=(0, 8),
        textcoords="offset points",
        ha="left" if place < 0.2 else "right" if place > 0.8 else "center",
        va="bottom",
        color=theme.text,
        fontsize=9.5,
        fontweight="bold",
        linespacing=1.3,
        parse_math=False,
    )


def _scale(axes: Axes, data: Data, points: Sequence[tuple[float, float, str]], theme: Theme) -> None:
    """Round numbers of a binary unit upwards, of a decimal one to the right."""
    peak, first, last = float(data["peak"]), points[0][0], points[-1][0]
    unit, name = unit_for(peak)
    axes.set_ylim(0, peak * 1.24)  # room for the words at the peak
    ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(0, peak / unit)
    axes.set_yticks([tick * unit for tick in ticks if 0 <= tick * unit <= peak * 1.1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g} {name}"))
    long = last - first >= 1
    axes.set_xlim(first, last if last > first else first + 1e-3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g} s" if long else f"{at * 1e3:g} ms"))
    axes.set_xlabel("time while it was tracked, which takes longer than a plain step", color=theme.faint, fontsize=9)


def _head(figure: Figure, axes: Axes, data: Data, phases: set[str], theme: Theme) -> None:
    title = axes.set_title(peak_words(data), loc="left", color=theme.text, fontsize=13, fontweight="bold", pad=30)
    title.set_parse_math(False)
    line = data["at"].get("line")
    below = f"live tensors on {data.get('device') or UNKNOWN}" + (f" · {clipped(line, 70)}" if line else "")
    axes.text(0, 1.035, below, transform=axes.transAxes, color=theme.faint, fontsize=8.5, parse_math=False)
    patches = [Patch(color=_colour(phase, theme), alpha=0.75, label=phase) for phase in PHASES if phase in phases]
    if patches:
        look: dict[str, Any] = {"handlelength": 1.1, "handleheight": 0.9, "columnspacing": 1.8, "frameon": False}
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": len(patches)}
        figure.legend(handles=patches, fontsize=9, labelcolor=theme.text, **place, **look)


def _colour(phase: str, theme: Theme) -> str:
    return {"forward": theme.metric, "backward": theme.loss, "optimizer": PURPLE[theme.dark]}.get(phase, theme.faint)


def unit_for(n: float) -> tuple[float, str]:
    """The binary unit that suits a number of bytes.

    >>> unit_for(3 * 2**20)
    (1048576.0, 'MiB')
    """
    power = min(int(math.log(max(n, 1), 1024)), 4)
    return 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
