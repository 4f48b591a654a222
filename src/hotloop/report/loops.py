"""Training loops and how fast they are, as a table, a picture, a sentence and a page."""

from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from hotloop.printing.text import clipped, count, printable
from hotloop.profiling.pace import REPEATS, LoopPace
from hotloop.records import Record
from hotloop.report import words
from hotloop.report.document import Block, Document, Table
from hotloop.report.plots import LIGHT, Form, Theme, dress, encoded, themed
from hotloop.report.runs import Run
from hotloop.report.tuning import half_spread
from hotloop.report.words import DASH, TIMES, Fact, times

WAY_NAMES = {"tutorial": "as in tutorials", "fit": "loop.fit"}
WIDE = 30.0  # times between the fastest and the slowest, from which on the axis is logarithmic
HEADER = ["device", "loop", "items/s", "±", f"{TIMES} tutorial", f"{TIMES} CPU", "plan"]


@dataclass(frozen=True)
class LoopsTimed(Record):
    """One model's training loop, timed on devices."""

    model: str
    seconds: float  # for each pace, its warm-up included
    paces: tuple[LoopPace, ...]
    devices: dict[str, str]  # name → its product name
    started: str  # ISO 8601, UTC
    versions: dict[str, str] = field(default_factory=dict)

    def tutorial(self, device: str) -> LoopPace | None:
        """The loop as tutorials write it, on a device."""
        return next((each for each in self.paces if each.device == device and each.way == "tutorial"), None)

    @property
    def fastest(self) -> LoopPace | None:
        """The fastest of all that did not fail."""
        return max((each for each in self.paces if each.rate), key=lambda each: each.rate or 0.0, default=None)


def loops_words(timed: LoopsTimed) -> str:
    """The answer, in a sentence."""
    best = timed.fastest
    if best is None:
        return "no loop could be timed"
    against = []
    beside, base = timed.tutorial(best.device), timed.tutorial("cpu")
    if best.way != "tutorial" and (gain := best.times(beside)) is not None:
        against.append(f"{times(gain)} the tutorial's loop there")
    if best.device != "cpu" and (gain := best.times(base)) is not None:
        against.append(f"{times(gain)} the tutorial's loop on the CPU")
    told = f"{WAY_NAMES[best.way]} on {best.device}: {count(best.rate or 0.0)} items/s"
    return ", ".join([told, *against])


def method_words(timed: LoopsTimed) -> str:
    """How it was measured."""
    each = f"{timed.seconds:.2g} s"
    return (
        f"Medians of {REPEATS} repeats after a warm-up, {each} for each loop, the device idle at both ends. loop.fit"
        f" plans for a run of {each}: a longer one may be faster."
    )


def loops_table(timed: LoopsTimed) -> RichTable:
    """A row for each loop on each device."""
    table = RichTable(box=box.HORIZONTALS, padding=(0, 1, 0, 0), pad_edge=False, border_style="dim", header_style="dim")
    header, rows = _cells(timed)
    for name in header:
        is_words = name in ("device", "loop", "plan")
        table.add_column(name, justify="left" if is_words else "right", no_wrap=name != "plan", overflow="fold")
    for pace, cells in zip(timed.paces, rows, strict=True):
        style = "dim" if pace.failure else "bold" if pace is timed.fastest else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _cells(timed: LoopsTimed) -> tuple[list[str], list[list[str]]]:
    """The header and the rows; the comparison with the CPU where there is another device."""
    shown = [name != f"{TIMES} CPU" or {"cpu"} < timed.devices.keys() for name in HEADER]
    return [*compress(HEADER, shown)], [[*compress(_row(timed, each), shown)] for each in timed.paces]


def _row(timed: LoopsTimed, pace: LoopPace) -> list[str]:
    low, high = (min(pace.rates), max(pace.rates)) if pace.rates else (None, None)
    gains = [pace.times(timed.tutorial(device)) for device in (pace.device, "cpu")]
    how = printable(pace.failure) if pace.failure else ", ".join(pace.plan)
    rate = DASH if pace.rate is None else count(pace.rate)
    return [pace.device, WAY_NAMES[pace.way], rate, half_spread(pace.rate, low, high), *map(_ratio, gains), how]


def _ratio(gain: float | None) -> str:
    return DASH if gain is None else times(gain)


def loops_picture(timed: LoopsTimed, theme: Theme = LIGHT, form: Form = "png") -> bytes:
    """A bar for each loop on each device, as long as it is fast."""
    paces = timed.paces
    figure = Figure(figsize=(9, 1.3 + 0.42 * len(paces)), layout="constrained", facecolor=theme.background)
    axes = figure.subplots()
    dress(axes, theme)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=theme.grid, linewidth=1)
    rates = [each.rate for each in paces if each.rate]
    if rates and max(rates) > WIDE * min(rates):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(rates) / 3, max(rates) * 6)
    elif rates:
        axes.set_xlim(0, max(rates) * 1.25)
    for number, pace in enumerate(paces):
        _draw_pace(axes, number, timed, pace, theme)
    axes.set_ylim(len(paces) - 0.5, -0.5)
    axes.set_yticks(range(len(paces)), [f"{each.device}: {WAY_NAMES[each.way]}" for each in paces], color=theme.text)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    scale = ", logarithmic" if axes.get_xscale() == "log" else ""
    axes.set_xlabel(f"items per second{scale}", color=theme.faint)
    on = ", ".join(clipped(name, 40) for name in timed.devices.values())
    axes.set_title(f"{clipped(timed.model, 40)} on {on}", loc="left", color=theme.text, fontsize=11, fontweight="bold")
    return encoded(figure, form)


def _draw_pace(axes: Axes, number: int, timed: LoopsTimed, pace: LoopPace, theme: Theme) -> None:
    place: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    if pace.rate is None:
        axes.annotate("failed", (axes.get_xlim()[0], number), color=theme.faint, **place)
        return
    colour = theme.faint if pace.way == "tutorial" else theme.metric
    axes.barh(number, pace.rate, height=0.62, color=colour, linewidth=0)
    axes.plot([min(pace.rates), max(pace.rates)], [number, number], color=theme.text, linewidth=1, alpha=0.6)
    base = timed.tutorial("cpu") or timed.tutorial(pace.device)
    gain = None if pace is base else pace.times(base)
    told = count(pace.rate) if gain is None else f"{count(pace.rate)}, {times(gain)}"
    axes.annotate(told, (max(pace.rates), number), color=theme.text, fontweight="bold", **place)


def loops_page(timed: LoopsTimed, command: str | None = None) -> str:
    """The loops on a page."""
    header, rows = _cells(timed)
    alt = "Items per second of each loop on each device"
    best = timed.fastest
    blocks: list[Block] = [
        themed("How fast each loop is", alt, partial(loops_picture, timed)),
        Table("Every loop", header, rows, method_words(timed), (0, 1, len(header) - 1)),
    ]
    facts = [Fact("device", device, name) for device, name in timed.devices.items()]
    if best is not None:
        facts.insert(
            0, Fact("fastest", f"{count(best.rate or 0.0)} items/s", f"{WAY_NAMES[best.way]} on {best.device}")
        )
    return Document(
        f"{timed.model}: its training loop, timed",
        blocks,
        facts,
        loops_words(timed),
        command=command,
        versions=timed.versions,
        when=words.when(timed.started),
    ).html()


def loops_run(timed: LoopsTimed) -> Run:
    """The entry of a benchmark."""
    figures = {f"{each.device}, {WAY_NAMES[each.way]}: items per second": each.rate for each in timed.paces}
    known = {name: value for name, value in figures.items() if value is not None}
    return Run("bench", timed.model, timed.started, ", ".join(timed.devices.values()), known)
