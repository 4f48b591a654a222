"""A benchmark as a page."""

from functools import partial

from harness.charts import (
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
from harness.records import DEFAULT, Benchmark
from harness.roofline import roofline
from hotloop.report import words
from hotloop.report.document import Block, Document, Fact, Table, Words
from hotloop.report.plots import themed
from hotloop.report.runs import Run
from hotloop.report.words import times


def benchmark_page(benchmark: Benchmark) -> str:
    """Who was how fast, how near that is to the hardware's limits, and how the losses compare."""
    groups = groups_of(benchmark)
    blocks: list[Block] = []
    if benchmark.end_to_end:
        header, rows = end_to_end_cells(benchmark)
        blocks.append(Table("What a person gets who says nothing", header, rows, WHOLE_LEGEND, (0, 1, len(header) - 1)))
    if groups:
        alt = "A bar for the speed of each contestant, a panel for each workload"
        blocks.append(themed("Who is how fast", alt, partial(bars, benchmark)))
    last = list(groups)[-1:]
    for (workload, device), scores in groups.items():
        rows = [list(cells_of(score, scores)) for score in scores]
        legend = LEGEND if (workload, device) in last else ""
        blocks.append(Table(f"{workload} on {device}: {scores[0].unit}", PLAIN_HEADER, rows, legend))
    for device in benchmark.ceilings:
        if any(score.device == device and score.flops and score.traffic for score in benchmark.scores):
            alt = "The workloads as points under the roof of what memory and arithmetic allow"
            draw = partial(roofline, benchmark, device)
            blocks.append(themed(f"How near to the limits of {device}", alt, draw))
    for each in benchmark.curves:
        alt = "The loss of the tutorial's loop and of the hot one, and how far they are apart"
        blocks.append(themed(f"The same training: {each.workload} on {each.device}", alt, partial(curves, each)))
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
