"""A `ScalingBenchmark` as tables and as a picture: ranks that were measured, and GPUs that were modelled."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rich.table import Table
from rich.text import Text

from harness.charts import QUICK, title
from harness.scaling_records import DDP, LOOP, MeasuredRanks, ModelledRanks, ScalingBenchmark
from hotloop.apps.simulate.scaling import Cluster
from hotloop.printing.text import clipped, count, duration, printable, size
from hotloop.report.plots import LIGHT, Form, Theme, dress, encoded
from hotloop.report.tuning import half_spread
from hotloop.report.words import DASH

HEADER = ("ranks", "", "per\nsecond", "\n±", "\nefficiency", "communi-\ncation", "\npredicted", "\nerror")
LEGEND = (
    "Each rank has the batch of one. Efficiency: against one rank with as many threads, which took its turns beside "
    "them. Communication: the share of a step that is gone under no_sync. Predicted: the efficiency that the model "
    "makes of the step of one rank and the measured all-reduces; the error is in percentage points."
)
MODELLED = (
    "Modelled, not measured: efficiency of DDP / FSDP if every GPU were as fast as one rank here. Nodes of 8 but for "
    "links without a second name, and no stragglers. docs/scaling.md has the formulas."
)
QUIET = 0.05  # share of the cores that other programs may use before it is told
COLOURS = ("#0b7285", "#5f3dc4", "#2b8a3e", "#e67700", "#c92a2a")


def scaling_table(found: ScalingBenchmark) -> Table:
    """What was measured, beside what was predicted; then what is modelled of more GPUs."""
    outer = Table.grid()
    outer.add_column(overflow="fold")
    threads = f"{found.threads} thread{'s' * (found.threads != 1)} each"
    heading = f"{found.workload} · {found.device} · {found.backend} · {found.unit} · {threads}"
    outer.add_row(Text(printable(heading), style="bold"))
    inner = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, name in enumerate(HEADER):
        inner.add_column(name, justify="left" if number == 1 else "right", no_wrap=True)
    for each in found.measured:
        inner.add_row(*map(Text, _cells(each)))
    outer.add_row(inner)
    outer.add_row("")
    for words in _measured_words(found):
        outer.add_row(Text(words))
    if found.others is not None and found.others > QUIET:
        busy = f"other programs used {found.others:.0%} of the cores meanwhile: measure again when the machine is idle"
        outer.add_row(Text(busy, style="yellow"))
    for why in found.failures:
        outer.add_row(Text(clipped(f"did not run: {why}", 300), style="yellow"))
    outer.add_row(Text(LEGEND, style="dim"))
    outer.add_row("")
    outer.add_row(_modelled_table(found.modelled))
    outer.add_row(Text(MODELLED, style="dim"))
    if found.quick:
        outer.add_row(Text(" ".join(QUICK), style="yellow"))
    return outer


def scaling_picture(found: ScalingBenchmark, theme: Theme = LIGHT, form: Form = "png") -> bytes:
    """Efficiency against GPUs: measured points, their prediction, and modelled lines; DDP beside FSDP."""
    figure = Figure(figsize=(9, 4.4), facecolor=theme.background)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.09)
    panels = figure.subplots(1, 2, sharey=True)
    quick = "quick run, not to be quoted: " if found.quick else ""
    above = f"{quick}{found.workload} on {clipped(found.hardware, 60 - len(quick))}: efficiency against ranks"
    figure.suptitle(printable(above), x=0.015, ha="left", color=theme.faint, fontsize=9.5, parse_math=False)
    for panel, parallel in zip(panels, ("ddp", "fsdp"), strict=True):
        title(panel, f"{parallel.upper()}, modelled" + (" and measured" if parallel == "ddp" else ""), theme)
        dress(panel, theme)
        _draw_lines(panel, [each for each in found.modelled if each.parallel == parallel])
        if parallel == "ddp":
            _draw_points(panel, found.measured, theme)
        _label(panel, theme)
    handles, labels = panels[0].get_legend_handles_labels()
    look: dict[str, Any] = {"frameon": False, "labelcolor": theme.text, "fontsize": 8.5}
    figure.legend(handles, labels, loc="outside lower center", ncols=4, **look)
    return encoded(figure, form)


def _cells(each: MeasuredRanks) -> list[str]:
    share, error = each.share, each.error
    return [
        str(each.ranks),
        each.way,
        count(each.rate.median),
        half_spread(each.rate.median, each.rate.low, each.rate.high),
        f"{each.efficiency.median:.1%}",
        DASH if share is None else f"{share:.1%}",
        DASH if each.predicted is None else f"{each.predicted.efficiency:.1%}",
        DASH if error is None else f"{100 * error:+.1f}",
    ]


def _measured_words(found: ScalingBenchmark) -> list[str]:
    """What stands behind the predictions."""
    step, said = found.step, []
    parts = ", ".join(f"{name} {duration(getattr(step, name))}" for name in ("forward", "backward", "update"))
    said.append(f"a step of one rank: {parts}; {size(step.gradient_bytes)} of gradients")
    for fit in found.fits:
        line = f"{duration(fit.latency)} + bytes / {fit.rate / 1e9:.3g} GB/s"
        said.append(f"all-reduce of {fit.gpus} ranks: {line}, the mean error of {len(fit.sizes)} sizes {fit.error:.0%}")
    for each in found.measured:
        if each.communication is None or each.predicted is None or each.sharing is None:
            continue
        low, middle, high = (
            duration(max(getattr(each.communication, name), 0.0)) for name in ("low", "median", "high")
        )
        predicted = duration(each.predicted.exposed)
        if each.waiting is not None:
            predicted += f" and {duration(max(each.waiting.median, 0.0))} of waits for the slower"
        said.append(
            f"{each.ranks} ranks: communication takes {middle} of a step ({low} to {high}), predicted {predicted};"
            f" without it, a step takes {each.sharing:+.0%} against that of one rank: they share the machine"
        )
    return said


def _modelled_table(modelled: Sequence[ModelledRanks]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("GPUs", justify="right")
    by_link: dict[str, dict[str, ModelledRanks]] = {}
    for each in modelled:
        by_link.setdefault(joined(each.cluster), {})[each.parallel] = each
    for name in by_link:
        table.add_column(name.replace(" + ", "\n+ "), justify="right", no_wrap=True)
    numbers = [step.gpus for step in modelled[0].steps] if modelled else []
    for row, gpus in enumerate(numbers):
        cells = (
            " / ".join(f"{ways[way].steps[row].efficiency:.0%}" for way in ("ddp", "fsdp") if way in ways)
            for ways in by_link.values()
        )
        table.add_row(f"{gpus:,}", *map(Text, cells))
    return table


def joined(cluster: Cluster) -> str:
    """The links of a cluster in words."""
    if cluster.between is None or cluster.node == 1:
        return cluster.inside.name
    return f"{cluster.inside.name} + {cluster.between.name}".replace("InfiniBand ", "").replace(" x16", "")


def _draw_lines(panel: Axes, modelled: Sequence[ModelledRanks]) -> None:
    for each, colour in zip(modelled, COLOURS, strict=False):
        at = [step.gpus for step in each.steps]
        panel.plot(
            at, [step.efficiency for step in each.steps], color=colour, linewidth=1.6, label=joined(each.cluster)
        )


def _draw_points(panel: Axes, measured: Sequence[MeasuredRanks], theme: Theme) -> None:
    for way, mark, colour, aside in ((DDP, "o", theme.loss, 1.0), (LOOP, "^", theme.text, 1.15)):
        some = [each for each in measured if each.way == way]
        for each in some:
            panel.plot(
                [aside * each.ranks] * 2, [each.efficiency.low, each.efficiency.high], color=colour, linewidth=1.4
            )
        at, values = [aside * each.ranks for each in some], [each.efficiency.median for each in some]
        if some:
            panel.plot(at, values, mark, color=colour, markersize=6, label=f"measured here, {way}", zorder=5)
    predicted = [(each.ranks, each.predicted.efficiency) for each in measured if each.predicted is not None]
    if predicted:
        where, expected = zip(*predicted, strict=True)
        panel.plot(
            where, expected, "D", label="predicted for here", zorder=4, linestyle="none", markersize=9,
            markerfacecolor="none", markeredgecolor=theme.text,
        )  # fmt: skip


def _label(panel: Axes, theme: Theme) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xlim(0.9, 1150)
    panel.set_ylim(0, 1.06)
    panel.xaxis.set_major_locator(FixedLocator([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    panel.tick_params(axis="x", labelsize=8)
    panel.set_xlabel("ranks", color=theme.faint, fontsize=9)
