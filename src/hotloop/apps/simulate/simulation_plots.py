"""The memory of a simulated GPU over its steps, one category upon another."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from hotloop.printing.text import clipped, size
from hotloop.report.memory_page import unit_for
from hotloop.report.plots import LIGHT, Form, Theme, dress, encoded

Data = dict[str, Any]  # what `Simulation.to_json()` gives, also after a trip through a file
Numbers = NDArray[np.float64]

# From the bottom up, each on a light and on a dark ground: what stays first, what comes and goes above it.
COLOURS = {
    "context": ("#aab1bd", "#5b6472"),
    "parameters": ("#1864ab", "#74b9ff"),
    "buffers": ("#4c8fd0", "#4f8fd6"),
    "optimizer": ("#7048b6", "#b79cf5"),
    "gradients": ("#e8590c", "#ff8a4c"),
    "inputs": ("#b08900", "#e6c34d"),
    "activations": ("#0b7285", "#4cc9d8"),
    "temporaries": ("#c2255c", "#f783ac"),
    "workspaces": ("#5c7c2f", "#a9c77d"),
}
LIMIT = ("#c92a2a", "#ff6b6b")
NAMED = 12  # steps that have room for their names
DRAWN = {False: 320, True: 180}  # points at most, in a wide and in a narrow picture
FAR = 2.2  # times the highest point: a card's memory above this would press the picture flat


def steps_plot(data: Data, form: Form = "png", theme: Theme = LIGHT, narrow: bool = False) -> bytes:
    """Allocated bytes by category over the steps, what the process holds, the card's memory, and the peak."""
    figure = Figure(figsize=(4.2, 4.6) if narrow else (9, 4.6), layout="constrained", facecolor=theme.background)
    axes = figure.subplots()
    dress(axes, theme)
    at, process, bands = _thinned(*_curves(data), DRAWN[narrow])
    if not len(at):
        axes.text(0.5, 0.5, "nothing was allocated", transform=axes.transAxes, ha="center", color=theme.faint)
        axes.set_axis_off()
        return encoded(figure, form)
    total = _draw_bands(axes, at, bands, theme)
    axes.plot(*_stairs(at, process), color=theme.text, linewidth=1.3)
    highest = max(float(process.max()), float(total.max()))
    shown = _draw_limit(axes, data.get("gpu_memory"), highest, theme)
    _scale(axes, max(highest, shown or 0.0, 1.0) * 1.13, theme)
    axes.set_xlim(at[0], at[-1] + 1)
    _mark_steps(axes, data.get("step_ends") or [], theme, narrow=narrow)
    _draw_peak(axes, at, total, process, theme)
    _head(axes, data, theme, narrow=narrow)
    _legend(figure, bands, theme, limit=shown is not None, narrow=narrow)
    return encoded(figure, form)


def far_above(data: Data) -> bool:
    """Whether the card's memory is so far above what is used that the picture leaves it out."""
    at, process, _ = _curves(data)
    return bool(len(at) and data.get("gpu_memory")) and float(data["gpu_memory"]) > FAR * float(process.max())


def _curves(data: Data) -> tuple[Numbers, Numbers, dict[str, Numbers]]:
    """Events, what the process holds, and the bytes of each category."""
    points = data.get("timeline") or []
    if not points:
        return np.empty(0), np.empty(0), {}
    at, allocated, reserved = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    bands = {band["category"]: np.array(band["bytes"], dtype=np.float64) for band in data.get("bands") or []}
    known = {name: bands[name] for name in COLOURS if name in bands}
    # What has another name, or none, still counts.
    rest = allocated - sum((held for name, held in known.items() if name != "context"), np.zeros(len(at)))
    if np.any(rest > 0) or not known:
        known["temporaries"] = known.get("temporaries", np.zeros(len(at))) + np.maximum(rest, 0)
    ordered = {name: known[name] for name in COLOURS if name in known}
    return at, reserved + known.get("context", 0), ordered


def _thinned(
    at: Numbers, process: Numbers, bands: dict[str, Numbers], limit: int
) -> tuple[Numbers, Numbers, dict[str, Numbers]]:
    """As many points as a picture can show: of neighbours the highest."""
    width = max(1, -(-len(at) // limit))
    if width == 1:
        return at, process, bands
    total = np.sum(list(bands.values()), axis=0)
    groups = [slice(begin, begin + width) for begin in range(0, len(at), width)]
    kept = [group.start + int(total[group].argmax()) for group in groups]
    most = np.array([process[group].max() for group in groups])
    return at[kept], most, {name: held[kept] for name, held in bands.items()}


def _stairs(at: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """The corners of a curve that keeps each value until the next; the last one for one more event."""
    return np.repeat(np.append(at, at[-1] + 1), 2)[1:-1], np.repeat(values, 2)


def _draw_bands(axes: Axes, at: Numbers, bands: dict[str, Numbers], theme: Theme) -> Numbers:
    """Each from the ground to its top, the highest first, so that a lower one covers what is not the higher one's."""
    tops = np.cumsum(list(bands.values()), axis=0)
    for name, top in reversed(list(zip(bands, tops, strict=True))):
        across, up = _stairs(at, top)
        axes.fill([across[0], *across, across[-1]], [0.0, *up, 0.0], color=_colour(name, theme), linewidth=0)
    total: Numbers = tops[-1]
    return total


def _draw_limit(axes: Axes, memory: int | None, highest: float, theme: Theme) -> float | None:
    """The card's memory as a line, where it is near enough to be shown."""
    if not memory or memory > FAR * highest:
        return None
    axes.axhline(memory, color=LIMIT[theme.dark], linewidth=1.4, linestyle=(0, (5, 3)))
    return float(memory)


def _scale(axes: Axes, top: float, theme: Theme) -> None:
    unit, name = unit_for(top)
    axes.set_ylim(0, top)
    ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top / unit)
    axes.set_yticks([tick * unit for tick in ticks if 0 <= tick * unit <= top])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g} {name}"))
    axes.set_xlabel("what is allocated and freed, one after another", color=theme.faint, fontsize=9)


def _mark_steps(axes: Axes, ends: list[int], theme: Theme, *, narrow: bool) -> None:
    """A line where a step ends, and below the picture its number."""
    axes.set_xticks([])
    few = len(ends) <= (NAMED // 2 if narrow else NAMED)
    begin = axes.get_xlim()[0]
    middles, names = [], []
    for number, end in enumerate(ends, start=1):
        if few or number < len(ends):
            axes.axvline(end, color=theme.faint, linewidth=0.8, linestyle=(0, (3, 3)), alpha=1 if few else 0.4)
        if few or number in (1, len(ends)):
            middles.append((begin + end) / 2)
            names.append(f"step {number}")
        begin = end
    axes.set_xticks(middles, names, color=theme.text)


def _draw_peak(axes: Axes, at: Numbers, total: Numbers, process: Numbers, theme: Theme) -> None:
    place = int(total.argmax())
    near = process[place] - total[place] < 0.08 * axes.get_ylim()[1]  # then the words go above that line
    across = (at[place] - at[0]) / (at[-1] + 1 - at[0])
    axes.plot([at[place]], [total[place]], "o", color=theme.background, markeredgecolor=theme.text, markersize=6)
    axes.annotate(
        "peak",
        (at[place], process[place] if near else total[place]),
        xytext=(0, 6),
        textcoords="offset points",
        ha="left" if across < 0.05 else "right" if across > 0.95 else "center",
        color=theme.text,
        fontsize=9,
        fontweight="bold",
    )


def _head(axes: Axes, data: Data, theme: Theme, *, narrow: bool) -> None:
    words = f"peak: {size((data.get('peak') or {}).get('allocated'))} allocated"
    below = peak_line(data, 44 if narrow else 90, drawn=True)
    axes.set_title(words, loc="left", color=theme.text, fontsize=12, fontweight="bold", pad=26 if below else 10)
    if below:
        axes.text(0, 1.03, below, transform=axes.transAxes, color=theme.faint, fontsize=9, parse_math=False)


def peak_line(data: Data, limit: int, *, drawn: bool = False) -> str:
    """Where the peak is, in words: by the person's line, the phase and the module; empty where nothing is known.

    A picture has no letters for every name on earth, so names that it may not be able to draw are left out of it.

    >>> peak_line({"peak_at": {"file": "train.py", "line": 7, "phase": "backward", "module": "head"}}, 80)
    'in backward of head, at train.py:7'
    """
    place = data.get("peak_at")
    if not place:
        return ""
    phase = {"optimizer": "in the optimizer", "other": ""}.get(place["phase"], f"in {place['phase']}")
    named = place["module"] and (not drawn or place["module"].isascii())
    module = f"of {place['module']}" if named and phase else ""
    file = place["file"] if not drawn or place["file"].isascii() else "line "
    line = f"at {file}{'' if file == 'line ' else ':'}{place['line']}"
    words = " ".join(filter(None, [phase, module]))
    return clipped(", ".join(filter(None, [words, line])), limit)


def _legend(figure: Figure, bands: dict[str, Numbers], theme: Theme, *, limit: bool, narrow: bool) -> None:
    handles: list[Patch | Line2D] = [
        Patch(color=_colour(name, theme), label=name) for name, held in reversed(bands.items()) if np.any(held > 0)
    ]
    handles.append(Line2D([], [], color=theme.text, linewidth=1.3, label="held by the process"))
    if limit:
        handles.append(
            Line2D([], [], color=LIMIT[theme.dark], linewidth=1.4, linestyle=(0, (5, 3)), label="memory of the card")
        )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=2 if narrow else 5,
        frameon=False,
        labelcolor=theme.text,
        fontsize=9,
        handlelength=1.3,
        handleheight=0.9,
    )


def _colour(name: str, theme: Theme) -> str:
    return COLOURS[name][theme.dark]
