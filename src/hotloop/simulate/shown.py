"""A `Simulation` as a person reads it in a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hotloop.simulate.record import Finding, Simulation
from hotloop.text import clipped, plural, printable, size

STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
MOST_LINES = 12  # of copies and waits; --json has all
DASH = "\N{EN DASH}"


def simulation_words(simulation: Simulation, gpu: str, script: str) -> Iterator[RenderableType]:
    """What would happen, the worst first."""
    ran = plural(simulation.completed, "step")
    short = "" if simulation.completed >= simulation.steps else f" of the {simulation.steps} asked for"
    yield Text(f"{printable(script)} on {printable(gpu)}, simulated for {ran}{short}", style="bold")
    for finding in simulation.findings:
        yield from _finding(finding)
    if not simulation.findings:
        yield Text("no device bug was found", style="green")
    if simulation.peak is not None:
        yield Text()
        yield Text(_fits(simulation), style="bold")
        yield _memory(simulation)
    if (step := simulation.step_ms) is not None:
        sure = "" if step.calibrated else "; uncalibrated: this GPU was not measured"
        yield Text()
        yield Text(f"a step takes {_ms(step.median)} ({_ms(step.low)} to {_ms(step.high)}{sure})", style="bold")
    yield from _crossings(simulation)
    for note in simulation.notes:
        yield Text(f"note: {printable(note)}", style="dim")


def cards_table(told: Sequence[Simulation], names: Sequence[str]) -> Table:
    """A line for each GPU."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("GPU")
    for name in ("fits", "memory", "step", "low", "high", "findings"):
        table.add_column(name, justify="right")
    for simulation, name in zip(told, names, strict=True):
        step, peak = simulation.step_ms, simulation.peak
        times = [DASH] * 3 if step is None else [_ms(step.median), _ms(step.low), _ms(step.high)]
        fits = {True: "yes", False: "no", None: "close"}[simulation.fits]
        row = [printable(name), fits, DASH if peak is None else size(peak.process), *times]
        table.add_row(*map(Text, [*row, str(len(simulation.findings))]))
    return table


def _finding(finding: Finding) -> Iterator[RenderableType]:
    where = f"{printable(finding.file)}:{finding.line}"
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
    verdict = {True: "it fits", False: "it does not fit", None: "it may or may not fit"}[simulation.fits]
    return f"{verdict}: the process would take {size(simulation.peak.process)} at its peak"


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
            where = clipped(f"{copy.file}:{copy.line}", 40)
            amount = f"{size(copy.bytes)} in {plural(copy.count, 'copy', 'copies')}"
            yield Text(f"  {where}: {copy.direction}, {amount}, {how}")
    if simulation.syncs:
        yield Text()
        yield Text("where the host waits for the device", style="bold")
        for sync in sorted(simulation.syncs, key=lambda sync: -sync.count)[:MOST_LINES]:
            where = clipped(f"{sync.file}:{sync.line}", 40)
            yield Text(f"  {where}: {printable(sync.kind)}, {plural(sync.count, 'time')}")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"
