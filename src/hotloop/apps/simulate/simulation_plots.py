"""The memory of a simulated GPU over its steps, one category upon another."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hotloop.apps.simulate.simulation_record import Simulation
from hotloop.printing.text import size
from hotloop.report.plots import LIGHT, Form, Theme, dress, encoded, unit_for

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
NAMED = 12  # steps that have room for their names
FAR = 2.2  # times the highest point: a card's memory above this would press the picture flat


def memory_plot(found: Simulation, form: Form = "png", theme: Theme = LIGHT) -> bytes:
    """Allocated bytes by category over the steps, what the process holds, the card's memory, and the peak."""
    figure = Figure(figsize=(9, 4.6), layout="constrained", facecolor=theme.background)
    axes = figure.subplots()
    dress(axes, theme)
    at, allocated, reserved = np.array(found.timeline, dtype=np.float64).T
    held = {band.category: np.array(band.bytes, dtype=np.float64) for band in found.bands}
    bands = {name: held[name] for name in COLOURS if name in held}
    context = held.get("context", np.zeros(len(at)))
    highest = float(np.max(reserved + context))
    unit, unit_name = unit_for(highest)
    colours = [COLOURS[name][theme.dark] for name in bands]
    axes.stackplot(at, [each / unit for each in bands.values()], labels=[*bands], colors=colours, step="post")
    process = (reserved + context) / unit
    axes.step(at, process, where="post", label="held by the process", color=theme.text, linewidth=1.3)
    if found.gpu_memory and found.gpu_memory < FAR * highest:
        axes.axhline(found.gpu_memory / unit, linestyle="--", label="memory of the card", color=theme.loss)
    peak = int(np.argmax(allocated))
    axes.plot(at[peak], (allocated + context)[peak] / unit, "o", markersize=5, color=theme.text)
    _mark_steps(axes, found.step_ends, at[0], theme)
    axes.set_ylabel(unit_name, color=theme.faint)
    axes.set_xlabel("what is allocated and freed, one after another", color=theme.faint, fontsize=9)
    words = f"peak: {size(float(allocated[peak]))} allocated"
    axes.set_title(words, loc="left", color=theme.text, fontsize=12, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, labelcolor=theme.text, fontsize=9)
    return encoded(figure, form)


def _mark_steps(axes: Axes, ends: tuple[int, ...], begin: float, theme: Theme) -> None:
    """A line where a step ends, and below the picture its number."""
    middles = []
    for end in ends[:NAMED]:
        axes.axvline(end, color=theme.faint, linewidth=0.8, linestyle=":")
        middles.append((begin + end) / 2)
        begin = end
    axes.set_xticks(middles, [f"step {number}" for number in range(1, len(middles) + 1)])
