"""A `Simulation` in words, the same in a terminal and on a page: the answer, what would go wrong, and where."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from hotloop.apps.simulate.simulation_record import (
    BEYOND,
    CUT,
    FAILED,
    NO_GPU,
    NO_STEPS,
    DeviceFinding,
    Simulation,
    StepTime,
)
from hotloop.printing.text import clipped, count, duration, plural, printable, size
from hotloop.report.document import Document, Fact, Facts, Plot, Table, Words
from hotloop.report.runs import Run
from hotloop.report.words import DASH, UNKNOWN, when

LIMITS = {
    "device": "the GPU computes most of the time",
    "launches": "launching the operations takes the host longer than computing them",
    "copies": "the GPU waits for what comes from the host",
}
NO_VERDICT = {
    FAILED: "failed",
    NO_STEPS: "did not train",
    NO_GPU: "never uses the GPU",
    CUT: "did not come far enough",
    BEYOND: "does what cannot be simulated",
}
FITS = {True: "it fits", False: "it does not fit", None: "too close to say whether it fits"}
STYLES = {"error": "bold red", "warning": "yellow", "fix": "cyan"}
MARK = "*"  # a time of a card that was not measured
LINES_SHOWN = 12  # of a table; the JSON has all
OUTSIDE = "outside any module"
METHOD = (
    "Nothing ran on a GPU: the script ran here, on tensors that have shapes but no values.",
    "Memory comes from a model of PyTorch's allocator, which heard of every tensor that came and went.",
    "Workspaces, the context and all times come from tables of constants. They are as near as the GPU that they were "
    "fitted on is to yours: where it was not measured, it says uncalibrated.",
    "What an operation costs the host is the same for every GPU. The data and the script's own work are left out.",
)


def simulation_words(found: Simulation, script: str) -> Iterator[RenderableType]:
    """What would happen, for a terminal."""
    yield Text(_title(found, script), style="bold")
    yield Text(verdict(found), style="bold")
    facts = Grid.grid(padding=(0, 2, 0, 0))
    for fact in headlines(found):
        facts.add_row(fact.label, Text(fact.value, style="bold"), Text(fact.detail))
    yield facts
    for block in blocks(found):
        yield Text()
        yield Text(block.title, style="bold")
        if isinstance(block, Table):
            rows = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
            for number in range(len(block.header)):
                rows.add_column(justify="left" if number in block.words else "right")
            for row in block.rows:
                rows.add_row(*map(Text, row))
            yield rows
        elif isinstance(block, Facts):
            for fact in block.facts:
                style = STYLES.get(re.split("[ ,]", fact.label)[0], "")
                said = Text.assemble((fact.label, style), f": {fact.value}")
                yield Padding(said, (0, 0, 0, 2 if fact.label == "fix" else 0))
                if fact.detail:
                    yield Padding(Text(fact.detail), (0, 0, 0, 2))
        else:
            yield from map(Text, block.sentences)


def simulation_page(
    found: Simulation, script: str, *, command: str | None = None, versions: dict[str, str] | None = None, date: str
) -> str:
    """The whole page: the same with the memory over time, and how it was found."""
    modules = Counter[str]()
    for name, amount in found.modules.items():
        modules[re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name)] += amount
    rows = [[printable(name) or OUTSIDE, size(amount)] for name, amount in modules.most_common()]
    said = "Activations alone, in the module that made them. * stands for the number of a layer."
    return Document(
        _title(found, script),
        [
            *_plot(found),
            *blocks(found),
            *_table("Activations by module", ["module", "at the peak"], rows, said),
            Words("How it was found", METHOD),
        ],
        headlines(found),
        verdict(found),
        None,
        None if command is None else printable(command),
        versions,
        when(date),
        "predicted by a model",
    ).html()


def simulation_run(found: Simulation, script: str, date: str) -> Run:
    """The entry of a simulation among the runs that are kept; named so that a measured one can be put beside it."""
    figures: dict[str, float | None] = {
        "median step in seconds": found.step_ms.median / 1e3 if found.step_ms else None,
        "memory of the process in bytes": found.peak.process if found.peak else None,
        "peak memory in bytes": found.peak.allocated if found.peak else None,
        "largest batch": found.largest_batch,
        "findings": len(found.findings),
    }
    known = {name: float(value) for name, value in figures.items() if value is not None}
    return Run("simulate", script, date, f"{_gpu(found)}, simulated", known)


def verdict(found: Simulation) -> str:
    """Whether it fits, in a sentence."""
    if why := NO_VERDICT.get(found.status):
        return f"no verdict: the script {why}, so its memory and its speed are not known"
    if found.peak is None:
        return ""
    of = f" of {size(found.gpu_memory)}" if found.gpu_memory else ""
    interval = found.interval
    between = f" ({size(interval.low.process)} to {size(interval.high.process)})" if interval else ""
    return f"{FITS[found.fits]}: the process would take {size(found.peak.process)}{of} at its peak{between}"


def headlines(found: Simulation) -> list[Fact]:
    """The numbers that a person looks for first."""
    facts, step, search = [], found.step_ms, found.search
    if search is not None:
        fills = f"; what fills the memory: {printable(search.limited_by)}" if search.limited_by else ""
        seen = f"{plural(search.runs, 'batch', 'batches')} simulated"
        if search.batch is None:
            facts.append(Fact("largest batch", "not even 1 fits" if search.exact else "none was seen to fit", seen))
        elif search.too_large is None:
            facts.append(Fact("largest batch", f"at least {search.batch:,}", f"no larger one was tried; {seen}"))
        else:
            facts.append(
                Fact("largest batch", f"{search.batch:,}", f"{search.too_large:,} does not fit{fills}; {seen}")
            )
    if step is not None:
        sure = "" if step.calibrated else "; uncalibrated: this GPU was not measured"
        facts.append(Fact("a step takes", _ms(step.median), f"{_ms(step.low)} to {_ms(step.high)}{sure}"))
    if (rate := found.samples_per_second) is not None:
        facts.append(Fact("samples per second", count(rate[0]), f"{count(rate[1])} to {count(rate[2])}"))
    if found.limited_by:
        facts.append(Fact("limited by", found.limited_by, LIMITS[found.limited_by]))
    if found.peak is not None:
        place = found.peak_at
        at = f"; the peak is at {_where(place.file, place.line)}" if place else ""
        phase = printable(f", in {place.phase} of {place.module}") if place and place.module else ""
        facts.append(
            Fact(
                "allocated", size(found.peak.allocated), f"at the peak; {size(found.peak.reserved)} reserved{at}{phase}"
            )
        )
    return facts


def blocks(found: Simulation) -> list[Facts | Table | Words]:
    """What would go wrong, what the memory is made of, copies, waits and notes."""
    facts = [fact for finding in found.findings for fact in _finding(finding)]
    nothing = Words("What would go wrong", ["no device bug was found in the lines that ran"])
    copies = [
        [
            _where(each.file, each.line),
            f"{printable(each.direction)}, {'pinned' if each.pinned else 'pageable'}",
            "the host waits" if each.blocking or not each.pinned else "the host goes on",
            size(each.bytes),
            plural(each.count, "copy", "copies"),
        ]
        for each in sorted(found.copies, key=lambda copy: -copy.bytes)
    ]
    waits = [
        [_where(each.file, each.line), printable(each.kind), plural(each.count, "time")]
        for each in sorted(found.syncs, key=lambda sync: -sync.count)
    ]
    return [
        Facts("What would go wrong", facts) if facts else nothing,
        *_table("What the peak is made of", ["what", "bytes", "share"], _categories(found)),
        *_table(
            "Copies between host and device", ["your line", "what", "", "bytes", "copies"], copies, words=(0, 1, 2)
        ),
        *_table("Where the host waits for the device", ["your line", "what", "times"], waits, words=(0, 1)),
        *([Words("Notes", [printable(note) for note in found.notes])] if found.notes else []),
    ]


def cards_table(told: Sequence[Simulation]) -> Grid:
    """A line for each GPU; columns of which nothing is known are left out."""
    names = [_gpu(each).removeprefix("NVIDIA ") for each in told]
    fits = {True: "yes", False: "no", None: "too close to say"}
    columns = {
        "fits": [fits[each.fits] if each.trained else each.status for each in told],
        "memory": [DASH if each.peak is None else size(each.peak.process) for each in told],
        "largest batch": [_batch(each) for each in told],
        "step": [_time(each.step_ms) for each in told],
        "samples/s": [
            "{:.3g} ({:.3g} to {:.3g})".format(*rate) if (rate := each.samples_per_second) else DASH for each in told
        ],
        "findings": [str(len(each.findings)) for each in told],
    }
    table = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("GPU", no_wrap=True)
    shown = {name: cells for name, cells in columns.items() if not {*cells} <= {DASH, "0"}}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=name in ("memory", "step"))
    for name, *cells in zip(names, *shown.values(), strict=True):
        table.add_row(*map(Text, [name, *cells]))
    return table


def ranking(told: Sequence[Simulation]) -> list[list[Simulation]]:
    """From the quickest to the slowest; those whose intervals overlap are one rank, since nobody can tell."""
    ranks: list[list[Simulation]] = []
    slowest = -math.inf  # of the rank before
    timed = [(step.low, number, step.high) for number, each in enumerate(told) if (step := each.step_ms)]
    for low, number, high in sorted(timed):
        if low > slowest:
            ranks.append([])
        ranks[-1].append(told[number])
        slowest = max(slowest, high)
    return ranks


def ranked(told: Sequence[Simulation]) -> str:
    """The GPUs by speed, in words."""
    ranks = [", ".join(_gpu(each).removeprefix("NVIDIA ") for each in rank) for rank in ranking(told)]
    if len(ranks) < 2:
        return "Too close to rank by speed: the intervals overlap." if ranks else ""
    return f"By speed: {'; then '.join(ranks)}. Where several stand together, their intervals overlap."


def _title(found: Simulation, script: str) -> str:
    short = "" if found.completed >= found.steps else f" of the {found.steps} asked for"
    return f"{clipped(script, 40)} on {_gpu(found)}, simulated for {plural(found.completed, 'step')}{short}"


def _gpu(found: Simulation) -> str:
    return printable(found.gpu_name or found.gpu)


def _plot(found: Simulation) -> list[Plot]:
    from hotloop.apps.simulate.simulation_plots import memory_plot  # noqa: PLC0415  # Matplotlib, which takes a second
    from hotloop.report.plots import themed  # noqa: PLC0415

    if not found.timeline or found.peak is None:
        return []
    alt = "Allocated memory over the steps, one category upon another, below what the process holds"
    return [themed("Memory over the steps", alt, lambda theme, form: memory_plot(found, form, theme))]


def _table(
    title: str, header: list[str], rows: list[list[str]], said: str = "", words: tuple[int, ...] = (0,)
) -> list[Table]:
    if not rows:
        return []
    more = f"{plural(len(rows) - LINES_SHOWN, 'more line')} in report.json." if len(rows) > LINES_SHOWN else ""
    return [Table(title, header, rows[:LINES_SHOWN], f"{said} {more}".strip(), words)]


def _finding(finding: DeviceFinding) -> Iterator[Fact]:
    suspected = ", perhaps" if finding.confidence == "suspected" else ""
    times = f", {finding.count:,} times" if finding.count > 1 else ""
    first, *more = [printable(line.strip()) for line in finding.message.splitlines()] or [UNKNOWN]
    where = _where(finding.file, finding.line) if finding.line else printable(finding.file)
    yield Fact(f"{printable(finding.level)}{suspected}{times}", f"{where}: {first}", ";\n".join(more))
    if finding.fix:
        yield Fact("fix", printable(finding.fix))


def _categories(found: Simulation) -> list[list[str]]:
    """What the peak is made of: name, bytes, share; together what the driver would show."""
    if found.peak is None:
        return []
    process = found.peak.process
    held = Counter(found.categories)
    held["cached by the allocator"] += max(0, process - held.total())
    rows = [*held.most_common(), ("the process", process)]
    return [[printable(name), size(amount), f"{amount / max(process, 1):.1%}"] for name, amount in rows if amount]


def _batch(found: Simulation) -> str:
    search = found.search
    if search is None or (search.batch is None and not search.exact):
        return DASH
    return f"{search.batch or 0:,}{'' if search.too_large is not None else '+'}"


def _time(step: StepTime | None) -> str:
    """With a mark where the card was not measured."""
    return DASH if step is None else f"{_ms(step.median)}{'' if step.calibrated else MARK}"


def _where(file: str, line: int) -> str:
    return clipped(f"{file}:{line}", 40) if file else "a line without a file"


def _ms(milliseconds: float) -> str:
    return duration(milliseconds / 1e3)
