"""Predictions beside measurements: a table for each training, how far off they are, and which marks are met.

python benchmarks/predictions/compare.py benchmarks/results/predictions_h200.json \
    benchmarks/results/measurements_h200.json --table docs/predictions.md --plot docs/predictions.png
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import FRESH
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from hotloop.records.files import write_whole
from hotloop.report.plots import LIGHT, dress, encoded

GIB = 2**30
Found = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """One training with one batch, predicted and measured."""

    key: str  # such as "resnet50 96"
    predicted: Found
    measured: Found

    def error(self, figure: str) -> float | None:
        """By what share the prediction is off: 0.05 is 5% too much; None where one of the two is not known."""
        return off(value(self.predicted, figure), value(self.measured, figure))


@dataclass(frozen=True)
class Mark:
    """Something that was promised, and how it came out."""

    what: str
    asked: str
    found: str
    met: bool | None  # None where nothing was measured


def value(found: Found, figure: str) -> float | None:
    told = found.get(figure)
    told = told.get("median") if isinstance(told, dict) else told
    return None if told is None else float(told)


def off(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


def pairs_of(predictions: Found, measurements: Found) -> list[Pair]:
    """What was both predicted and measured, in the order of the predictions."""
    measured = measurements["measurements"]
    return [Pair(key, told, measured[key]) for key, told in predictions["predictions"].items() if key in measured]


def errors(pairs: Sequence[Pair], figure: str) -> list[float]:
    """How far off, without the sign, the least first."""
    return sorted(abs(error) for pair in pairs if (error := pair.error(figure)) is not None)


def worst_of(sizes: Sequence[float], share: float = 0.9) -> float:
    """The size that so many are at or below.

    >>> worst_of([0.01, 0.02, 0.03, 0.9], 0.75)
    0.03
    """
    return sorted(sizes)[math.ceil(share * len(sizes)) - 1]


@dataclass(frozen=True)
class Verdicts:
    """What was said of whether trainings fit under caps."""

    right: int
    wrong: tuple[str, ...]
    open: int  # too close to say
    run: int  # of all these, what reserves more than its cap and was run under it: the others fit in any case

    @property
    def share(self) -> float | None:
        """Of the wrong ones among those that were run under their cap; where none was, among all."""
        every = self.run or self.right + len(self.wrong) + self.open
        return len(self.wrong) / every if every else None

    def __str__(self) -> str:
        every = self.right + len(self.wrong) + self.open
        hard = f"; {self.run} reserve more than their cap" if self.run else ""
        return f"{len(self.wrong)} of {every} wrong, {self.open} too close to say{hard}"


def verdicts_of(pairs: Sequence[Pair], measurements: Found) -> Verdicts:
    """Each training under each cap; one that never reserved as much as the cap fits under it."""
    right, undecided, ran, wrong = 0, 0, 0, []
    for pair in pairs:
        for cap, said in pair.predicted["fits"].items():
            run = measurements["capped"].get(f"{pair.key} {cap}")
            fitted = True if pair.measured["reserved"] <= int(cap) * GIB else run and run["fits"]
            if fitted is None:
                continue
            ran += pair.measured["reserved"] > int(cap) * GIB
            if said is None:
                undecided += 1
            elif said == fitted:
                right += 1
            else:
                wrong.append(f"{pair.key} under {cap} GiB: said {_fit(said)}, and it {_fit(fitted)}")
    return Verdicts(right, tuple(wrong), undecided, ran)


def _fit(fits: bool) -> str:
    return "fits" if fits else "does not fit"


def largest_of(predictions: Found, measurements: Found) -> list[tuple[str, int, int, float]]:
    """(training and cap, predicted, measured, error) of every largest batch that both know."""
    rows = []
    for key, told in predictions["largest"].items():
        seen = measurements["largest"].get(key)
        if seen is not None and seen["batch"] and told["batch"] is not None:
            rows.append((key, told["batch"], seen["batch"], told["batch"] / seen["batch"] - 1))
    return rows


def marks_of(predictions: Found, measurements: Found) -> list[Mark]:
    """Every promise, and whether it is kept."""
    pairs = pairs_of(predictions, measurements)
    found = [
        _spread_mark("allocated", errors(pairs, "allocated"), 0.01, 0.05),
        _spread_mark("reserved", errors(pairs, "reserved"), 0.02, 0.06),
        _spread_mark("step time", errors(pairs, "step_ms"), 0.12, None),
    ]
    verdicts = verdicts_of(pairs, measurements)
    share = verdicts.share
    said = "nothing was measured" if share is None else str(verdicts)
    found.append(Mark("verdicts", "at most 2% wrong", said, None if share is None else share <= 0.02))
    batches = [abs(error) for *_, error in largest_of(predictions, measurements)]
    near = sum(round(error, 6) <= 0.03 for error in batches) / len(batches) if batches else None
    said = "nothing was measured" if near is None else f"{near:.0%} within 3%, of {len(batches)}"
    found.append(Mark("largest batch", "90% within 3%", said, None if near is None else near >= 0.9))
    return found


def _spread_mark(what: str, sizes: list[float], median: float, worst: float | None) -> Mark:
    asked = f"{median:.0%} median" + ("" if worst is None else f", {worst:.0%} at 90%")
    if not sizes:
        return Mark(what, asked, "nothing was measured", None)
    middle, far = statistics.median(sizes), worst_of(sizes)
    found = f"{middle:.1%} median, {far:.1%} at 90%, {max(sizes):.1%} at most, of {len(sizes)}"
    return Mark(what, asked, found, middle <= median and (worst is None or far <= worst))


def table_of(predictions: Found, measurements: Found) -> str:
    """All of it as Markdown."""
    pairs = pairs_of(predictions, measurements)
    parts = [
        f"Predicted with torch {predictions['versions']['torch']} and no GPU, measured on {measurements['gpu']} with"
        f" torch {measurements['versions']['torch']}; GiB and milliseconds, predicted / measured.",
        lines(("what", "mark", "found", ""), [_mark_row(mark) for mark in marks_of(predictions, measurements)]),
        *_of_fresh(pairs),
        lines(
            ("training, batch", "allocated", "", "reserved", "", "process", "", "step", ""),
            [_pair_row(pair) for pair in pairs],
        ),
    ]
    batches = largest_of(predictions, measurements)
    if batches:
        rows = [(key, f"{told:,}", f"{seen:,}", f"{error:+.1%}") for key, told, seen, error in batches]
        parts.append(lines(("training, cap in GiB", "largest batch predicted", "measured", ""), rows))
    wrong = verdicts_of(pairs, measurements).wrong
    if wrong:
        parts.append("Wrong verdicts:\n\n" + "\n".join(f"- {words}" for words in wrong))
    missing = [key for key in predictions["predictions"] if key not in measurements["measurements"]]
    if missing:
        parts.append(f"Not measured: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def _of_fresh(pairs: Sequence[Pair]) -> list[str]:
    """The same of the trainings that had not run on a GPU before, in a sentence; nothing where there is none."""
    fresh = [pair for pair in pairs if pair.predicted.get("training") in FRESH]
    if not fresh:
        return []
    said = []
    for words, figure in (("allocated", "allocated"), ("reserved", "reserved"), ("step time", "step_ms")):
        sizes = errors(fresh, figure)
        said.append(f"{words} {statistics.median(sizes):.1%} median, {worst_of(sizes):.1%} at 90%")
    return [f"Of these, {len(fresh)} are of trainings that had not run on a GPU before: {'; '.join(said)}."]


def _mark_row(mark: Mark) -> tuple[str, ...]:
    return mark.what, mark.asked, mark.found, "" if mark.met is None else ("met" if mark.met else "**missed**")


def _pair_row(pair: Pair) -> tuple[str, ...]:
    cells = [pair.key.replace(" ", ", ")]
    for figure in ("allocated", "reserved", "process", "step_ms"):
        show = _milliseconds if figure == "step_ms" else _gib
        told, seen = value(pair.predicted, figure), value(pair.measured, figure)
        error = pair.error(figure)
        cells += [f"{show(told)} / {show(seen)}", "" if error is None else f"{error:+.1%}"]
    return tuple(cells)


def _gib(size: float | None) -> str:
    return "–" if size is None else f"{size / GIB:.2f}"


def _milliseconds(time: float | None) -> str:
    return "–" if time is None else f"{time:.1f}"


def lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def plot_of(predictions: Found, measurements: Found) -> bytes:
    """Predicted against measured, as a PNG: what is right lies on the line."""
    pairs = pairs_of(predictions, measurements)
    panels: list[tuple[str, str, Callable[[float], float]]] = [
        ("allocated", "allocated, GiB", lambda size: size / GIB),
        ("reserved", "reserved, GiB", lambda size: size / GIB),
        ("step_ms", "step, ms", float),
    ]
    figure = Figure(figsize=(10.5, 3.9), layout="constrained", facecolor=LIGHT.background)
    for axes, (name, title, scale) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        both = [(value(pair.measured, name), value(pair.predicted, name)) for pair in pairs]
        points = [(scale(seen), scale(told)) for seen, told in both if seen and told]
        _draw(axes, title, points, 0.12 if name == "step_ms" else 0.05)
    return encoded(figure)


def _draw(axes: Axes, title: str, points: Sequence[tuple[float, float]], near: float) -> None:
    axes.set_title(title, loc="left", color=LIGHT.text, fontsize=11, fontweight="bold")
    dress(axes, LIGHT)
    axes.set_xlabel("measured", color=LIGHT.faint)
    axes.set_ylabel("predicted", color=LIGHT.faint)
    if not points:
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center", color=LIGHT.faint)
        return
    ends = [min(map(min, points)) / 1.3, max(map(max, points)) * 1.3]
    axes.loglog(ends, ends, color=LIGHT.faint, linewidth=1)
    axes.fill_between(ends, [e * (1 - near) for e in ends], [e * (1 + near) for e in ends], color=LIGHT.grid)
    inside = [abs(told / seen - 1) <= near for seen, told in points]
    for right, colour in ((True, LIGHT.metric), (False, LIGHT.loss)):
        chosen = [point for point, good in zip(points, inside, strict=True) if good == right]
        if chosen:
            label = f"within {near:.0%}" if right else "further off"
            axes.plot(*zip(*chosen, strict=True), "o", color=colour, markersize=4.5, alpha=0.85, label=label)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.set_major_formatter(lambda number, _: f"{number:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, labelcolor=LIGHT.text, fontsize=9, loc="upper left")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the tables here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="and a plot here")
    arguments = parser.parse_args()
    predictions, measurements = (
        json.loads(path.read_text()) for path in (arguments.predictions, arguments.measurements)
    )
    table = table_of(predictions, measurements)
    print(table)
    if arguments.table:
        write_whole(arguments.table, table.encode())
    if arguments.plot:
        write_whole(arguments.plot, plot_of(predictions, measurements))
    return 0 if all(mark.met for mark in marks_of(predictions, measurements)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
