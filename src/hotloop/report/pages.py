"""Benchmarks and tunings as pages."""

from collections.abc import Callable
from functools import partial

from hotloop.plan import Tuning
from hotloop.records import DEFAULT, Benchmark
from hotloop.report import words
from hotloop.report.benchmark import (
    LEGEND,
    OURS,
    PLAIN_HEADER,
    QUICK,
    TUTORIAL,
    WHOLE_LEGEND,
    bars,
    cells_of,
    curves,
    end_to_end_cells,
    failures_of,
    groups_of,
)
from hotloop.report.document import Block, Document, Plot, Table, Words
from hotloop.report.plots import DARK, LIGHT, Form, Theme
from hotloop.report.roofline import roofline
from hotloop.report.runs import Run
from hotloop.report.tuning import cells_of as trial_cells
from hotloop.report.tuning import tuning_words, waterfall
from hotloop.report.words import Fact, times
from hotloop.text import count, duration

Draw = Callable[[Theme, Form], bytes]


def benchmark_page(benchmark: Benchmark) -> str:
    """Who was how fast, how near that is to the hardware's limits, and how the losses compare."""
    groups = groups_of(benchmark)
    blocks: list[Block] = []
    if benchmark.end_to_end:
        header, rows = end_to_end_cells(benchmark)
        blocks.append(Table("What a person gets who says nothing", header, rows, WHOLE_LEGEND, (0, 1, len(header) - 1)))
    if groups:
        alt = "A bar for the speed of each contestant, a panel for each workload"
        blocks.append(_plot("Who is how fast", alt, partial(bars, benchmark)))
    last = list(groups)[-1:]
    for (workload, device), scores in groups.items():
        rows = [list(cells_of(score, scores)) for score in scores]
        legend = LEGEND if (workload, device) in last else ""
        blocks.append(Table(f"{workload} on {device}: {scores[0].unit}", PLAIN_HEADER, rows, legend))
    for device in benchmark.ceilings:
        if any(score.device == device and score.flops and score.traffic for score in benchmark.scores):
            alt = "The workloads as points under the roof of what memory and arithmetic allow"
            draw = partial(roofline, benchmark, device)
            blocks.append(_plot(f"How near to the limits of {device}", alt, draw))
    for each in benchmark.curves:
        alt = "The loss of the tutorial's loop and of the hot one, and how far they are apart"
        blocks.append(_plot(f"The same training: {each.workload} on {each.device}", alt, partial(curves, each)))
    if failures := failures_of(benchmark):
        blocks.append(Words("What did not run", failures))
    return Document(
        "Training loops side by side",
        blocks,
        _headlines(benchmark),
        f"{benchmark.hardware}. All contestants train the same model on the same batches from the same weights.",
        QUICK if benchmark.quick else None,
        command=benchmark.command,
        versions=benchmark.versions | ({"commit": benchmark.commit} if benchmark.commit else {}),
        when=words.when(benchmark.date),
    ).html()


def benchmark_run(benchmark: Benchmark) -> Run:
    """The entry of a benchmark."""
    figures = {f"{s.workload} on {s.device}, {s.contestant}: {s.unit} per second": s.rate for s in benchmark.scores}
    for row in benchmark.end_to_end:
        for run in row.runs:
            if run.given == DEFAULT:
                warm = ", warm" * run.warm
                figures[f"{row.workload} on {row.device}, default in a run of {run.length:g} s{warm}: times"] = run.gain
    timed = [score.workload for score in benchmark.scores] + [row.workload for row in benchmark.end_to_end]
    workloads = ", ".join(dict.fromkeys(timed)) or "nothing"
    title = f"{workloads}, quick" if benchmark.quick else workloads
    return Run("bench", title, benchmark.date, benchmark.hardware, figures)


def tuning_page(tuning: Tuning, command: str | None = None) -> str:
    """The way from the plain loop to the plan."""
    header = ["lever", "tier", "times", "±", "step", "verdict", "why"]
    caption = "Tier A: the same numbers. B: other rounding. C: other training."
    alt = "From the plain loop to the plan, a bar for the gain of each lever"
    blocks: list[Block] = [
        _plot("From the plain loop to the plan", alt, partial(waterfall, tuning)),
        Table("Every lever", header, [list(trial_cells(trial)) for trial in tuning.trials], caption, (0, 5, 6)),
    ]
    run = "unknown" if tuning.steps is None else count(tuning.steps)
    return Document(
        f"A plan for {tuning.model}",
        blocks,
        [
            Fact("faster", times(tuning.gain), "than the plain loop"),
            Fact("step", duration(tuning.step), f"plain {duration(tuning.plain_step)}"),
            Fact("tuned in", duration(tuning.seconds), f"for a run of {run} steps"),
            Fact("device", tuning.plan.device, tuning.device_name),
        ],
        tuning_words(tuning),
        command=command,
        versions=tuning.versions,
        when=words.when(tuning.made),
    ).html()


def tuning_run(tuning: Tuning) -> Run:
    """The entry of a tuning."""
    figures = {
        "step of the plan in seconds": tuning.step,
        "plain step in seconds": tuning.plain_step,
        "tuning in seconds": tuning.seconds,
    }
    known = {name: value for name, value in figures.items() if value is not None}
    return Run("tune", tuning.model, tuning.made, tuning.device_name, known)


def _plot(title: str, alt: str, draw: Draw) -> Plot:
    return Plot(title, alt, draw(LIGHT, "svg"), draw(DARK, "svg"))


def _headlines(benchmark: Benchmark) -> list[Fact]:
    """How many times as fast as the tutorial's loop, for each workload."""
    facts = []
    for (workload, device), scores in groups_of(benchmark).items():
        rates = {score.contestant: score.rate for score in scores}
        if OURS in rates and rates.get(TUTORIAL):
            detail = f"the tutorial's loop on {device}"
            facts.append(Fact(workload, times(rates[OURS] / rates[TUTORIAL]), detail))
    for row in benchmark.end_to_end:
        runs = [run for run in row.runs if run.given == DEFAULT and not run.warm]
        if runs:
            longest = max(runs, key=lambda run: run.length)
            detail = f"the tutorial's loop on {row.device}, in a run of {longest.length:g} s"
            facts.append(Fact(row.workload, times(longest.gain), detail))
    return facts
