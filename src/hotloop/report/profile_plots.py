"""Pictures of a `Profile`: its parts as one bar, a step in time, and memory over a step."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hotloop.printing.text import duration
from hotloop.profiling.advice import has_kernels
from hotloop.profiling.profile_record import CATEGORIES, PARTS, Profile, StepParts
from hotloop.report.memory_page import unit_for
from hotloop.report.plots import LIGHT, Form, Theme, dress, encoded

LABELS = {
    "data": "waiting for data",
    "copies": "copying",
    "waits": "waiting for the device",
    "gaps": "host-bound gaps",
    "communication": "communication",
    "compute": "compute",
}
# On a light and on a dark ground.
COLOURS = {
    "data": ("#e8590c", "#ff8a4c"),
    "copies": ("#7048b6", "#b79cf5"),
    "waits": ("#c2255c", "#f783ac"),
    "gaps": ("#b08900", "#e6c34d"),
    "communication": ("#1864ab", "#74b9ff"),
    "compute": ("#0b7285", "#4cc9d8"),
    "parameters": ("#1864ab", "#74b9ff"),
    "gradients": ("#e8590c", "#ff8a4c"),
    "optimizer": ("#7048b6", "#b79cf5"),
    "activations": ("#0b7285", "#4cc9d8"),
    "other": ("#8a93a3", "#78818f"),
}


def label(part: str, device: str) -> str:
    """A part of the time as a heading.

    >>> label("gaps", "cpu"), label("gaps", "cuda:0")
    ('Python between operations', 'host-bound gaps')
    """
    return "Python between operations" if part == "gaps" and not has_kernels(device) else LABELS[part]


def parts_bar(profile: Profile, form: Form = "png", theme: Theme = LIGHT, narrow: bool = False) -> bytes:
    """The whole time as one bar, divided."""
    shares = {name: share for name, share in profile.parts.shares.items() if share > 0}
    columns = 1 if narrow else 3
    lines = -(-len(shares) // columns)
    width, height = (4.2 if narrow else 9), 0.82 + 0.25 * lines
    figure = Figure(figsize=(width, height), facecolor=theme.background)
    bar = 0.62
    axes = figure.add_axes((0.01, 1 - (bar + 0.05) / height, 0.98, bar / height))
    left = 0.0
    for name, share in shares.items():
        axes.barh(0, share, left=left, color=_colour(name, theme), linewidth=1.2, edgecolor=theme.background, height=1)
        if share > (0.14 if narrow else 0.07):
            words = f"{share:.0%}"
            at = left + share / 2
            axes.text(at, 0, words, ha="center", va="center", color=theme.background, fontsize=13, fontweight="bold")
        left += share
    axes.set(xlim=(0, 1), ylim=(-0.5, 0.5))
    axes.set_axis_off()
    handles = [
        Patch(color=_colour(name, theme), label=f"{label(name, profile.device)}  {share:.1%}")
        for name, share in shares.items()
    ]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 0.0),
        ncols=columns,
        frameon=False,
        labelcolor=theme.text,
        fontsize=10,
        handlelength=1,
        handleheight=0.9,
        columnspacing=2.2,
    )
    return encoded(figure, form)


def step_plot(
    profile: Profile, step: StepParts, form: Form = "png", theme: Theme = LIGHT, narrow: bool = False
) -> bytes:
    """One step in time: a lane for each part, filled where the time went to it."""
    seconds = step.parts.seconds
    lanes = [name for name in PARTS if seconds[name] > 0]
    height = 0.62 + max(len(lanes), 1) * (0.56 if narrow else 0.42)
    figure = Figure(figsize=(4.2 if narrow else 9, height), layout="constrained", facecolor=theme.background)
    axes = figure.subplots()
    dress(axes, theme)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=theme.grid, linewidth=1)
    edges = np.linspace(0, step.parts.total, len(step.slices) + 1)
    for row, name in enumerate(lanes):
        filled = np.array([piece.shares[name] for piece in step.slices])
        base = np.full(len(edges), -row - 0.36)
        level = base + 0.72 * np.append(filled, filled[-1] if len(filled) else 0)
        axes.axhspan(-row - 0.36, -row + 0.36, color=theme.grid, alpha=0.35, linewidth=0)
        axes.fill_between(edges, base, level, step="post", color=_colour(name, theme), linewidth=0)
    words = [f"{label(name, profile.device)}  {duration(seconds[name])}" for name in lanes]
    if narrow:  # the names would take half of the width
        axes.set_yticks([])
        for row, word in enumerate(words):
            axes.text(0, -row + 0.39, word, color=theme.text, fontsize=8.5, va="bottom")
    else:
        axes.set_yticks([-row for row in range(len(lanes))], words, color=theme.text)
    axes.set_ylim(-len(lanes) + 0.45, 0.75 if narrow else 0.5)
    axes.set_xlim(0, step.parts.total or 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4 if narrow else 8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: duration(at) if at else "0"))
    return encoded(figure, form)


def memory_plot(profile: Profile, form: Form = "png", theme: Theme = LIGHT, narrow: bool = False) -> bytes:
    """What was alive over a step, one category upon another."""
    figure = Figure(figsize=(4.2, 3.6) if narrow else (9, 3.9), layout="constrained", facecolor=theme.background)
    axes = figure.subplots()
    dress(axes, theme)
    samples = profile.memory
    at = np.array([sample.seconds for sample in samples])
    base = np.zeros(len(samples))
    left_out = {"other": always_there(profile)}
    for name in CATEGORIES:
        held = np.array([getattr(sample, name) for sample in samples], dtype=np.float64)
        top = base + held - left_out.get(name, 0)
        if np.any(top > base):
            axes.fill_between(
                at, base, top, step="post", color=_colour(name, theme), linewidth=0, alpha=0.9, label=name
            )
        base = top
    peak = float(base.max()) if len(base) else 0.0
    axes.set_ylim(0, peak * 1.12 or 1)
    axes.set_xlim(0, float(at.max()) if len(at) and at.max() > 0 else 1)
    unit, name = unit_for(peak)
    axes.set_yticks([tick * unit for tick in MaxNLocator(5).tick_values(0, peak / unit) if tick * unit <= peak * 1.12])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g} {name}"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4 if narrow else 8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda moment, _: duration(moment) if moment else "0"))
    _phases(axes, profile, theme)
    handles, words = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        words[::-1],
        loc="outside lower center",
        ncols=3 if narrow else 5,
        frameon=False,
        labelcolor=theme.text,
        fontsize=9,
        handlelength=1.1,
        handleheight=0.9,
    )
    return encoded(figure, form)


def always_there(profile: Profile) -> int:
    """Bytes of no known purpose that lived through the whole step, if they would press all else flat; else 0."""
    least = min((sample.other for sample in profile.memory), default=0)
    return least if least > 0.5 * max((sample.total for sample in profile.memory), default=0) else 0


def _phases(axes: Axes, profile: Profile, theme: Theme) -> None:
    """Lines where another phase of the step begins, with its name; phases that flicker are left out."""
    length = profile.memory[-1].seconds or 1.0
    last, name = -length, ""
    for sample in profile.memory:
        if sample.phase and sample.phase != name and sample.seconds - last > 0.08 * length:
            axes.axvline(sample.seconds, color=theme.faint, linewidth=0.8, linestyle=(0, (3, 3)))
            axes.annotate(
                f" {sample.phase}",
                (sample.seconds, 1),
                xycoords=("data", "axes fraction"),
                va="top",
                color=theme.faint,
                fontsize=8.5,
            )
            last = sample.seconds
        name = sample.phase


def _colour(name: str, theme: Theme) -> str:
    return COLOURS[name][theme.dark]
