"""Small tables and pictures for notebooks and pages: HTML that inherits the colours and the font around it."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from hotloop.printing.text import printable

# A page may set its own; these can be seen on a light ground and on a dark one.
FIRST, SECOND = "var(--hotloop-1, #e8590c)", "var(--hotloop-2, #1098ad)"
BANDS = ("#1864ab", FIRST, "#7048b6", SECOND, "#8a93a3")  # areas upon one another, from the bottom
GRID = "rgba(128,128,128,.28)"
FAINT = "opacity:.7"
MOST_POINTS = 240  # of a line: a notebook keeps all of them in its file
SHORT = 24  # characters of a cell that stay on one line
SMOOTHED = 75  # points from which on a curve also has its trend
SMALLEST, LARGEST = 1e-30, 1e30  # sizes beyond which the scale of a plot would not be finite


def safe(words: object) -> str:
    """Words from anywhere, as the text of a page.

    >>> safe('<b onclick="x">')
    '&lt;b onclick=&quot;x&quot;&gt;'
    """
    return escape(printable(str(words)))


def box(*parts: str) -> str:
    """What is shown together, below one another."""
    style = "max-width:60em;line-height:1.45;overflow-x:auto;font-variant-numeric:tabular-nums"
    return f'<div style="{style}">{"".join(parts)}</div>'


def line(words: object, *, strong: bool = False, faint: bool = False) -> str:
    """A line of words.

    >>> line("a < b")
    '<div>a &lt; b</div>'
    """
    style = f' style="{FAINT}"' if faint else ""
    return f"<div{style}>{f'<strong>{safe(words)}</strong>' if strong else safe(words)}</div>"


def lines(words: str) -> str:
    """Lines of words, the first of them strong."""
    return "".join(line(each, strong=number == 0) for number, each in enumerate(words.splitlines()))


def folded(title: str, *parts: str) -> str:
    """What is shown once its title is clicked."""
    return f'<details style="margin:.3em 0"><summary>{safe(title)}</summary>{"".join(parts)}</details>'


def table(
    rows: Sequence[Sequence[object]], header: Sequence[str] = (), *, words: Collection[int] = (0,), html: bool = False
) -> str:
    """Rows of cells; `words` are the columns that are set to the left. With `html` the cells are markup already."""

    def cell(column: int, value: object, tag: str, style: str) -> str:
        side = "left" if column in words else "right"
        lines = "normal" if column in words and len(str(value)) > SHORT else "nowrap"
        inside = str(value) if html and tag == "td" else safe(value)
        return (
            f'<{tag} style="text-align:{side};white-space:{lines};padding:.1em 1.2em .1em 0;{style}">{inside}</{tag}>'
        )

    def row(values: Sequence[object], tag: str, style: str) -> str:
        return f"<tr>{''.join(cell(column, value, tag, style) for column, value in enumerate(values))}</tr>"

    body = "".join(row(each, "td", "vertical-align:top") for each in rows)
    head = f"<thead>{row(header, 'th', f'font-weight:normal;vertical-align:bottom;{FAINT}')}</thead>" if header else ""
    style = "border:none;border-collapse:collapse;table-layout:auto;width:auto;margin:.3em 0;background:none"
    return f'<table style="{style}">{head}<tbody>{body}</tbody></table>'


def bar(share: float | None, *, colour: str = FIRST, width: str = "100%") -> str:
    """A bar that is filled by a share of its length; None: by nobody knows how much."""
    filled = 0.0 if share is None else min(max(share, 0.0), 1.0)
    inner = f"width:{filled:.2%};height:100%;background:{colour};border-radius:inherit"
    outer = f"width:{width};height:.5em;margin:.35em 0;border-radius:.25em;background:{GRID};overflow:hidden"
    return f'<div style="{outer}"><div style="{inner}"></div></div>'


def bars(rows: Sequence[tuple[str, float, str]], *, whole: float | None = None) -> str:
    """Rows of a name, a bar that is filled by its share of the whole, else of the longest, and what there is to say."""
    full = whole or max((length for _, length, _ in rows), default=0.0) or 1.0
    cells = [[safe(name), bar(length / full, colour=SECOND, width="14em"), safe(told)] for name, length, told in rows]
    return table(cells, words=(0, 1, 2), html=True)


@dataclass(frozen=True)
class Series:
    """Points of a plot, in the order of x."""

    points: Sequence[tuple[float, float]]
    label: str = ""
    colour: str = FIRST
    dots: bool = False
    filled: bool = False  # an area: its points go around it
    stroke: float = 2.2
    opacity: float = 1.0


def learning(
    curve: Sequence[tuple[float, float]],
    epochs: int,
    scored: Sequence[tuple[float, float]] = (),
    metric: tuple[str, Sequence[tuple[float, float]]] | None = None,
) -> str:
    """The loss over the epochs with that of the validation, and below it a metric. `curve` is counted in epochs."""
    curve = [point for point in curve if _is_drawn(point)]
    scored = [point for point in scored if _is_drawn(point)]
    right = max([float(epochs), *(x for x, _ in curve[-1:])])
    if not curve or right <= 0:
        return line("no batch was run", faint=True)
    drawn = [Series(_thin(curve), "training" if len(curve) < SMOOTHED else "", opacity=1.0)]
    if len(curve) >= SMOOTHED:
        drawn = [
            Series(_thin(curve), opacity=0.35, stroke=1),
            Series(_smooth(curve, 100), "training, smoothed"),
        ]
    if scored:
        drawn.append(Series(scored, "validation", SECOND, dots=True))
    stops = [(stop, f"{stop:g}") for stop in _ticks(0.0, right, 9) if stop == int(stop)]
    losses, trend = sorted(loss for _, loss in curve), drawn[-2 if scored else -1].points
    # One wild batch must not press the rest of the curve flat.
    high = losses[min(int(0.995 * len(losses)), len(losses) - 1)]
    high = 1.05 * max(high, *(abs(loss) for _, loss in trend), *(loss for _, loss in scored), 0.0)
    panels = [_panel("loss", drawn, stops, right, min(losses[0], 0.0), high)]
    if metric is not None and (points := [point for point in metric[1] if _is_drawn(point)]):
        name, values = metric[0], [value for _, value in points]
        is_share = "accuracy" in name.lower() and all(0 <= value <= 1 for value in values)
        low, high = (0.0, 1.0) if is_share else (min(values), max(values))
        series = [Series(points, "", SECOND), Series(points, "", SECOND, dots=True)]
        panels.append(_panel(f"validation {name}", series, stops, right, low, high, height=80, percent=is_share))
    return "".join(panels)


def stacked(
    title: str, moments: Sequence[float], bands: Mapping[str, Sequence[float]], stops: Sequence[tuple[float, str]]
) -> str:
    """Amounts that last from one moment to the next, one upon another; `stops` are words below their moments."""
    areas: list[Series] = []
    top = [0.0] * len(moments)
    for (label, amounts), colour in zip(bands.items(), BANDS, strict=True):
        top = [below + amount for below, amount in zip(top, amounts, strict=True)]
        stairs = [(at, top[max(i - before, 0)]) for i, at in enumerate(moments) for before in (1, 0)]
        around = [(moments[0], 0.0), *stairs, (moments[-1], 0.0)]
        areas.insert(0, Series(around, label, colour, filled=True))  # those below are drawn over it
    return _panel(title, areas, stops, moments[-1] or 1.0, 0.0, 1.05 * max(top), height=240)


def _panel(
    title: str,
    series: Sequence[Series],
    stops: Sequence[tuple[float, str]],
    right: float,
    low: float,
    high: float,
    *,
    height: int = 170,
    percent: bool = False,
) -> str:
    """One plot. Its lines stretch with the window, its words do not."""
    if not high - low > 1e-9 * max(abs(low), abs(high), SMALLEST):  # all the same
        low, high = low - (abs(low) or 1) / 2, low + (abs(low) or 1) / 2

    def x(value: float) -> float:
        return 1000 * value / right

    def y(value: float) -> float:
        return 1000 * (1 - (min(max(value, low), high) - low) / (high - low))

    levels = _ticks(low, high, 4)
    paths = [_path([(0, y(level)), (1000, y(level))], GRID, 1) for level in levels]
    for each in series:
        places = [(x(at), y(value)) for at, value in each.points]
        if each.dots or len(places) == 1:
            paths += [_path([place, place], each.colour, 7) for place in places]
        else:
            paths.append(_path(places, each.colour, each.stroke, each.opacity, filled=each.filled))
    beside = "".join(
        f'<span style="position:absolute;right:.6em;top:{y(level) / 10:.1f}%;transform:translateY(-50%);{FAINT}">'
        f"{f'{level:.0%}' if percent else f'{level:g}'}</span>"
        for level in levels
    )
    below = "".join(
        f'<span style="position:absolute;left:{x(stop) / 10:.1f}%;transform:translateX(-50%);{FAINT}">'
        f"{safe(words)}</span>"
        for stop, words in stops
    )
    legend = "".join(
        f'<span style="margin-left:1em;white-space:nowrap"><span style="color:{each.colour}">'
        f"{'●' if each.dots else '■' if each.filled else '━'}</span> {safe(each.label)}</span>"
        for each in series
        if each.label
    )
    svg = (
        f'<svg role="img" aria-label="{safe(title)}" viewBox="0 0 1000 1000" preserveAspectRatio="none"'
        f' style="position:absolute;width:100%;height:100%;overflow:visible">{"".join(paths)}</svg>'
    )
    return (
        '<div style="margin:.7em 0;max-width:60em">'
        '<div style="display:flex;flex-wrap:wrap;justify-content:space-between">'
        f'<strong>{safe(title)}</strong><span style="font-size:.85em">{legend}</span></div>'
        '<div style="font-size:.85em;line-height:1;white-space:nowrap">'
        f'<div style="display:flex;height:{height}px;margin:.7em 1em 0 0">'
        f'<div style="position:relative;flex:0 0 4em">{beside}</div>'
        f'<div style="position:relative;flex:1 1 0;min-width:0">{svg}</div></div>'
        f'<div style="position:relative;height:1.3em;margin:.7em 1em 0 4em">{below}</div></div></div>'
    )


def _path(
    places: Sequence[tuple[float, float]], colour: str, stroke: float, opacity: float = 1.0, *, filled: bool = False
) -> str:
    """A line; of one place, a dot."""
    d = "M" + "L".join(f"{x:.4g} {y:.4g}" for x, y in places)
    fade = "" if opacity == 1 else f";opacity:{opacity:g}"
    if filled:
        return f'<path d="{d}" style="fill:{colour}"/>'
    style = f"fill:none;stroke:{colour};stroke-width:{stroke:g};stroke-linecap:round;stroke-linejoin:round{fade}"
    return f'<path d="{d}" vector-effect="non-scaling-stroke" style="{style}"/>'


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`.

    >>> _ticks(0.0, 2.3, 5), _ticks(0.0, 30.0, 9)
    ([0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0])
    """
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(unit * times for times in (1, 2, 5, 10) if (high - low) / (unit * times) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _is_drawn(point: tuple[float, float]) -> bool:
    return abs(point[1]) < LARGEST  # NaN is not


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many points, the last one among them."""
    stride = math.ceil(len(points) / MOST_POINTS)
    return [*points[:-1:stride], *points[-1:]]


def _smooth(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """The mean over a window around each of so many points, smaller towards both ends.

    Towards the beginning it is smaller on both sides: losses fall quickly there. The last ones differ by chance alone.

    >>> _smooth([(1, 0.0), (2, 3.0), (3, 6.0), (4, 3.0)], 4)
    [(1, 0.0), (2, 3.0), (3, 6.0), (4, 3.0)]
    """
    half, last = len(points) // 50, len(points) - 1
    found = []
    for at in sorted({round(number * last / max(most - 1, 1)) for number in range(most)}):
        reach = min(half, at)
        found.append((points[at][0], fmean(value for _, value in points[at - reach : at + reach + 1])))
    return found
