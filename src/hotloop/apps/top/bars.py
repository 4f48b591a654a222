"""Bars, sparklines and rules, a cell at a time."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.cells import cell_len
from rich.text import Text

from hotloop.apps.top.cells import UNKNOWN, cropped, fit, known, left, right
from hotloop.apps.top.history import History

EIGHTHS = " ▏▎▍▌▋▊▉"
LEVELS = "▁▂▃▄▅▆▇█"
LABEL, VALUE = 12, 18  # cells of "utilisation" and of "100.2 of 141.0 GiB"
LONGEST_CURVE = 120  # two cells for each second of a minute

Curve = Callable[[int], str]  # a minute of something, in so many cells


def gauge(label: str, percent: float | None, told: str, curve: Curve, width: int, style: str = "green") -> Text:
    """A line that tells one number in three ways: as a bar, in words, and how it came about."""
    room = max(width - LABEL - VALUE - 5, 0)
    long = min(room // 2, LONGEST_CURVE)
    line = Text("  ").append(left(label, LABEL), style="dim").append(bar(percent, room - long, style))
    line.append(" ").append(right(told, VALUE)).append("  ").append(curve(long), style=style)
    return cropped(line, width)


def rule(title: str, width: int, stats: str = "", style: str = "bold") -> Text:
    """The line above a part of the screen: its title, and numbers at the right."""
    name = fit(title, max(width - 4, 0))
    told = f" {stats} " if stats and cell_len(name) + cell_len(stats) + 8 <= width else ""
    line = Text().append("─ ", style="dim").append(name, style=style).append(" ")
    line.append("─" * max(width - line.cell_len - cell_len(told) - 1, 0), style="dim")
    return cropped(line.append(told).append("─", style="dim"), width)


def bar(percent: float | None, cells: int, style: str = "green") -> Text:
    """A bar that is filled to a percentage, to an eighth of a cell.

    >>> bar(50, 9).plain, bar(None, 3).plain
    ('████▌░░░░', '–  ')
    """
    value = known(percent)
    if cells <= 0:
        return Text()
    if value is None:
        return Text(UNKNOWN.ljust(cells), style="dim")
    full, eighths = divmod(round(min(max(value, 0), 100) / 100 * cells * 8), 8)
    filled = "█" * full + (EIGHTHS[eighths] if eighths else "")
    return Text(filled, style=style).append("░" * (cells - len(filled)), style="dim")


def sparkline(values: Sequence[float | None], most: float | None = 100) -> str:
    """A cell for each value, from the lowest level at 0 to the highest at `most`; a blank where nothing is known.

    >>> sparkline([0, 50, None, 100])
    '▁▅ █'
    """
    top = known(most)
    return "".join(_level(known(value), top) for value in values)


def _level(value: float | None, top: float | None) -> str:
    if value is None or not top or top < 0:
        return " "
    return LEVELS[round(min(max(value / top, 0), 1) * (len(LEVELS) - 1))]


def past(history: History, values: Sequence[float | None], most: float | None = 100) -> Curve:
    """The values of a history as a curve up to now."""
    times = history.times

    def curve(cells: int) -> str:
        if len(times) < 2:  # one sample is no curve
            return " " * cells
        return sparkline(slices(times, values, cells, now=times[-1], seconds=history.seconds), most)

    return curve


def slices(
    times: Sequence[float], values: Sequence[float | None], cells: int, *, now: float, seconds: float = 60
) -> list[float | None]:
    """The history as so many slices of time up to now, each the mean of what was known in it.

    A slice in which nothing was sampled repeats the one before, unless the gap is longer than the samples are apart.
    The slices lie on a fixed grid of time: a curve moves to the left, and does not change its shape on the way.
    """
    if cells <= 0:
        return []
    width = seconds / cells
    first = int(now // width) - cells + 1
    found: dict[int, list[float]] = {}
    for time, value in zip(times, values, strict=True):
        sample = known(value)
        if sample is not None:
            found.setdefault(int(time // width), []).append(sample)
    means = [sum(these) / len(these) if (these := found.get(first + cell)) else None for cell in range(cells)]
    return _bridged(means, int(_apart(times) * 1.5 // width))


def _apart(times: Sequence[float]) -> float:
    """How far apart samples usually are, in seconds."""
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    return gaps[len(gaps) // 2] if gaps else 0.0


def _bridged(means: list[float | None], longest: int) -> list[float | None]:
    """The same, with gaps of at most so many slices filled by the value before them."""
    whole: list[float | None] = []
    last, since = None, 0
    for mean in means:
        last, since = (last, since + 1) if mean is None else (mean, 0)
        whole.append(last if since <= longest else None)
    return whole
