"""A `Simulation` as a person reads it in a terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hotloop.apps.simulate.compare import RateInterval, Row, ranking
from hotloop.apps.simulate.largest_batch import SearchResult, what_helps
from hotloop.apps.simulate.simulation_record import (
    BEYOND,
    CUT,
    FAILED,
    NO_GPU,
    NO_STEPS,
    DeviceFinding,
    Simulation,
    StepPace,
    StepTime,
)
from hotloop.printing.text import clipped, count, plural, printable, size

LIMITS = {
    "device": "the GPU limits: it computes most of the time",
    "launches": "the host limits: launching the operations takes longer than computing them",
    "copies": "copies between host and device limit",
    "data": "the data limits: the GPU waits for batches",
    "work": "the script's own work on the host limits: the GPU waits for it",
}
MARK = "*"  # a time of a card that was not measured
STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
MOST_LINES = 12  # of copies and waits; --json has all
DASH = "\N{EN DASH}"
NO_VERDICT = {
    FAILED: "failed",
    NO_STEPS: "did not train",
    NO_GPU: "never uses the GPU",
    CUT: "did not come far enough",
    BEYOND: "does what cannot be simulated",
}


def simulation_words(simulation: Simulation, gpu: str, script: str, row: Row | None = None) -> Iterator[RenderableType]:
    """What would happen, the worst first; `row` has the speed and the cost."""
    ran = plural(simulation.completed, "step")
    short = "" if simulation.completed >= simulation.steps else f" of the {simulation.steps} asked for"
    several = f"{simulation.gpus} × " if simulation.gpus > 1 else ""
    yield Text(f"{printable(script)} on {several}{printable(gpu)}, simulated for {ran}{short}", style="bold")
    for finding in simulation.findings:
        yield from _finding(finding)
    if not simulation.findings:
        yield Text("no device bug was found", style="green")
    if not simulation.trained:
        yield Text()
        why = NO_VERDICT[simulation.status]
        yield Text(f"no verdict: the script {why}, so its memory and its speed are not known", style="bold")
    if simulation.peak is not None:
        yield Text()
        yield Text(_fits(simulation), style="bold")
        yield _memory(simulation)
    if simulation.search is not None:
        yield Text()
        yield from _largest(simulation.search)
    if simulation.helps:
        yield Text()
        yield from _helps(simulation)
    if (step := simulation.step_ms) is not None:
        sure = "" if step.calibrated else "; uncalibrated: this GPU was not measured"
        yield Text()
        yield Text(f"a step takes {_ms(step.median)} ({_ms(step.low)} to {_ms(step.high)}{sure})", style="bold")
    if simulation.pace is not None:
        yield from _pace(simulation.pace)
    if row is not None and row.samples_per_second is not None:
        yield Text(f"{_between(row.samples_per_second)} samples a second")
    if row is not None and row.dollars_per_million is not None:
        yield Text(
            f"{_between(row.dollars_per_million, '$')} for a million samples, at ${row.dollars_per_hour:g} an hour"
        )
    yield from _crossings(simulation)
    for note in simulation.notes:
        yield Text(f"note: {printable(note)}", style="dim")


def cards_table(told: Sequence[Simulation], names: Sequence[str], rows: Sequence[Row]) -> Table:
    """A line for each GPU; columns of which nothing is known are left out."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("GPU", no_wrap=True)
    columns: dict[str, list[str]] = {"fits": [], "memory": []}
    if any(simulation.search is not None for simulation in told):
        columns["largest batch"] = [_batch(simulation) for simulation in told]
    for simulation in told:
        fits = {True: "yes", False: "no", None: "too close to say"}[simulation.fits]
        columns["fits"].append(fits if simulation.trained else simulation.status)
        columns["memory"].append(DASH if simulation.peak is None else size(simulation.peak.process))
    columns["step"] = [_time(row.step_ms) for row in rows]
    if any(row.step_ms and row.pace_ms and row.pace_ms.median > 1.02 * row.step_ms.median for row in rows):
        columns["with data"] = [_time(row.pace_ms) for row in rows]
    if any(row.samples_per_second for row in rows):
        columns["samples/s"] = [_between(row.samples_per_second) for row in rows]
    if any(row.dollars_per_hour is not None for row in rows):
        columns["for a million"] = [_between(row.dollars_per_million, "$") for row in rows]
    if any(simulation.findings for simulation in told):
        columns["findings"] = [str(len(simulation.findings)) for simulation in told]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=name in ("memory", "step"))
    for name, *cells in zip(names, *columns.values(), strict=True):
        table.add_row(*map(Text, [printable(name).removeprefix("NVIDIA "), *cells]))
    return table


def ranked(rows: Sequence[Row], names: Mapping[str, str]) -> str:
    """The cards by speed, in words; `names` by their keys."""
    ranks = [", ".join(printable(names[gpu]).removeprefix("NVIDIA ") for gpu in rank) for rank in ranking(rows)]
    if len(ranks) < 2:
        return "Too close to rank by speed: the intervals overlap." if len(rows) > 1 and ranks else ""
    return f"By speed: {'; then '.join(ranks)}. Where several stand together, their intervals overlap."


def _pace(pace: StepPace) -> Iterator[RenderableType]:
    """What a person waits for beside the GPU, and which of all limits."""
    parts = []
    if pace.data_ms:
        by = f" by {plural(pace.workers, 'worker')}" if pace.workers else ""
        parts.append(f"batches take {_ms(pace.data_ms)} each step{by}")
    if pace.work_ms:
        parts.append(f"the script's own work on the host {_ms(pace.work_ms)}")
    if parts:
        step = pace.step_ms
        yield Text(f"with data and host work, a step every {_ms(step.median)} ({_ms(step.low)} to {_ms(step.high)})")
        yield Text(f"  measured on this machine: {', '.join(parts)}", style="dim")
    yield Text(f"  {LIMITS[pace.limited_by]}")


def _time(step: StepTime | None) -> str:
    """With a mark where the card was not measured."""
    return DASH if step is None else f"{_ms(step.median)}{'' if step.calibrated else MARK}"


def _largest(found: SearchResult) -> Iterator[RenderableType]:
    """The answer of a search, what is too large, and why."""
    if found.batch is None:
        yield Text("not even a batch of 1 fits" if found.exact else "no batch was seen to fit", style="bold")
    else:
        more = "no larger one was tried" if found.too_large is None else f"{found.too_large:,} does not fit"
        atleast = "" if found.too_large is not None else " at least"
        yield Text(f"the largest batch is{atleast} {found.batch:,}: {more}", style="bold")
    if found.limited_by:
        yield Text(f"  what fills the memory: {printable(found.limited_by)}")
    yield Text(f"  {plural(found.runs, 'batch', 'batches')} simulated", style="dim")


def _helps(simulation: Simulation) -> Iterator[RenderableType]:
    """Changes that make room, with their numbers; those that do not are named."""
    plain, *tried = simulation.helps
    said = what_helps(plain, tried)
    if said:
        yield Text("what would make room", style="bold")
        yield from (Text(f"  {printable(words)}") for words in said)
    elif tried:
        yield Text(f"none of these takes less memory: {'; '.join(each.change for each in tried)}")


def _batch(simulation: Simulation) -> str:
    found = simulation.search
    if found is None or (found.batch is None and not found.exact):
        return DASH
    return f"{found.batch or 0:,}{'' if found.too_large is not None else '+'}"


def _between(rates: RateInterval | None, unit: str = "") -> str:
    """A number with its interval."""
    if rates is None:
        return DASH
    return f"{unit}{count(rates.median)} ({count(rates.low)} to {count(rates.high)})"


def _finding(finding: DeviceFinding) -> Iterator[RenderableType]:
    where = printable(f"{finding.file}:{finding.line}" if finding.line else finding.file)
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    suspected = " perhaps" if finding.confidence == "suspected" else ""
    first, *more = [printable(line.strip()) for line in finding.message.splitlines() or [""]]
    yield Text()
    yield Text.assemble((f"{finding.level}{suspected}", STYLES.get(finding.level, "")), f" {where}: {first}{times}")
    for line in more:
        yield Padding(Text(line), (0, 0, 0, 2))
    if finding.fix:
        yield Padding(Text(f"fix: {printable(finding.fix)}", style="cyan"), (0, 0, 0, 2))


def _fits(simulation: Simulation) -> str:
    assert simulation.peak is not None
    verdict = {True: "it fits", False: "it does not fit", None: "too close to say whether it fits"}[simulation.fits]
    said = f"{verdict}: the process would take {size(simulation.peak.process)} at its peak"
    if simulation.interval is None:
        return said
    return f"{said} ({size(simulation.interval.low.process)} to {size(simulation.interval.high.process)})"


def _memory(simulation: Simulation) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), pad_edge=False, show_header=False)
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for name, amount in sorted(simulation.categories.items(), key=lambda pair: -pair[1]):
        table.add_row(Text(printable(name)), size(amount))
    return table


def _crossings(simulation: Simulation) -> Iterator[RenderableType]:
    if simulation.copies:
        yield Text()
        yield Text("copies between host and device", style="bold")
        for copy in sorted(simulation.copies, key=lambda copy: -copy.bytes)[:MOST_LINES]:
            how = f"{'pinned' if copy.pinned else 'pageable'}, {'blocking' if copy.blocking else 'not blocking'}"
            where = _place(copy.file, copy.line)
            amount = f"{size(copy.bytes)} in {plural(copy.count, 'copy', 'copies')}"
            yield Text(f"  {where}: {copy.direction}, {amount}, {how}")
    if simulation.syncs:
        yield Text()
        yield Text("where the host waits for the device", style="bold")
        for sync in sorted(simulation.syncs, key=lambda sync: -sync.count)[:MOST_LINES]:
            where = _place(sync.file, sync.line)
            yield Text(f"  {where}: {printable(sync.kind)}, {plural(sync.count, 'time')}")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def _place(file: str, line: int) -> str:
    return clipped(f"{file}:{line}", 40) if file else "a line without a file"
