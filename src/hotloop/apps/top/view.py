"""The screen of `hotloop top`: what rich draws of a reading and its advice, the most important first."""

import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from hotloop.apps.top.advice import Advice
from hotloop.apps.top.cells import UNKNOWN, age, amount, number, part, rate, share, tame
from hotloop.apps.top.ranks import RankRun, TopReading
from hotloop.monitor.reading import Gpu, Host, Process, Reading
from hotloop.printing.text import plural

FULL, NEARLY = 97, 85  # percent of a GPU's memory, in red and in yellow
SILENT = 10.0  # seconds after which it is told how old a rank's word is; ranks say one every two
YOURS = "▸"  # before a process of the person who looks
NO_GPU = "No GPU is seen here; `hotloop device` says why."
WORDS = {"", "user", "command", "host", "device", "line"}  # columns of words
BADGE = (" ! ", "bold black on yellow")


def screen(reading: Reading, advice: Sequence[Advice], me: str | None = None) -> Group:
    """What is shown of a reading; the processes of `me` come first and are marked."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reading.time))
    said = " · ".join(["", tame(reading.host.name), f"driver {tame(reading.driver)}", when])
    notes = reading.notes or (() if reading.gpus else (NO_GPU,))
    runs = reading.runs if isinstance(reading, TopReading) else ()
    return Group(
        Text.assemble(("hotloop top", "bold"), said),
        *(_warning(each) for each in advice),
        *(part for gpu in reading.gpus for part in _gpu(gpu)),
        *(Text(tame(note), style="dim" if reading.gpus else "yellow") for note in notes),
        *_host(reading.host),
        *(part for run in runs for part in _ranks(run, reading.time)),
        *(_processes(reading, me) if reading.gpus else ()),
    )


def _warning(advice: Advice) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text(*BADGE), Text(tame(advice.words), style="bold"))
    if advice.fix:
        grid.add_row("", Text(f"fix: {tame(advice.fix)}", style="cyan"))
    return grid


def _gpu(gpu: Gpu) -> Iterator[RenderableType]:
    """What is known in words, and its two bars."""
    name = f"GPU {gpu.index} {tame(gpu.name)}"
    if gpu.error is not None:
        yield Text.assemble((name, "bold red"), f" · {tame(gpu.error)}")
        return
    watts = part(number(gpu.power, " W"), number(gpu.power_limit, " W"))
    clocks = part(number(gpu.clock, " MHz"), number(gpu.clock_most, " MHz"))
    words = ["", number(gpu.temperature, " °C"), f"fan {number(gpu.fan, '%')}", watts, clocks]
    yield Text.assemble((name, "bold"), " · ".join(words))
    line = Text(f"  PCIe ↓ {rate(gpu.received)} ↑ {rate(gpu.sent)}")
    if gpu.throttled:
        line.append(f" · throttled: {', '.join(map(tame, gpu.throttled))}", style="yellow")
    if gpu.ecc_uncorrected:
        line.append(f" · {gpu.ecc_uncorrected:,} uncorrected ECC errors", style="red")
    yield line
    held = share(gpu.memory_used, gpu.memory_total)
    memory = part(amount(gpu.memory_used), amount(gpu.memory_total))
    colour = "red" if (held or 0) >= FULL else "yellow" if (held or 0) >= NEARLY else "blue"
    yield _bars(
        ("utilisation", gpu.utilisation, number(gpu.utilisation, "%"), "green"), ("memory", held, memory, colour)
    )


def _host(host: Host) -> Iterator[RenderableType]:
    read, written, received, sent = map(rate, (host.disk_read, host.disk_written, host.net_received, host.net_sent))
    traffic = f" · swap {amount(host.swap_used)} · disk ↓ {read} ↑ {written} · net ↓ {received} ↑ {sent}"
    yield Text.assemble(("host", "bold"), traffic)
    cores = f"{number(host.cpu, '%')} of {plural(host.cores, 'core')}" if host.cores else number(host.cpu, "%")
    memory = part(amount(host.memory_used), amount(host.memory_total))
    filled = share(host.memory_used, host.memory_total)
    yield _bars(("CPU", host.cpu, cores, "magenta"), ("RAM", filled, memory, "magenta"))


def _bars(*bars: tuple[str, float | None, str, str]) -> Table:
    """Numbers side by side, each with its name, as a bar and in words."""
    grid = Table.grid(padding=(0, 1), expand=True)
    cells: list[RenderableType] = []
    for (label, percent, told, style), widths in zip(bars, ((13, 15), (6, 17)), strict=True):
        grid.add_column(no_wrap=True, min_width=widths[0])
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, min_width=widths[1])
        known = min(max(percent or 0.0, 0.0), 100.0)
        bar = ProgressBar(completed=known, complete_style=style, finished_style=style)
        cells += [Text(f"  {label}" if not cells else label, style="dim"), bar, Text(told)]
    grid.add_row(*cells)
    return grid


def _title(words: str) -> Rule:
    return Rule(Text(words, style="bold"), align="left", style="dim")


def _table(*titles: str) -> Table:
    """A table without lines: words to the left, numbers to the right; the last column takes what is left."""
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    for title in titles:
        ratio = 1 if title == titles[-1] else None
        table.add_column(title, no_wrap=True, justify="left" if title in WORDS else "right", ratio=ratio)
    return table


def _processes(reading: Reading, me: str | None) -> Iterator[RenderableType]:
    """The processes on all GPUs: those of the person who looks first, then by memory."""
    rows = [(gpu.index, process) for gpu in reading.gpus for process in gpu.processes or ()]
    if not rows:
        unknown = all(gpu.processes is None for gpu in reading.gpus)
        why = f"{UNKNOWN}: the driver does not tell which processes use the GPU." if unknown else None
        yield Text(why or "No process holds memory of a GPU.", style="dim")
        return

    def is_mine(process: Process) -> bool:
        return process.ours or (me is not None and process.user == me)

    marked = f", {YOURS} yours" if any(is_mine(process) for _, process in rows) else ""
    yield _title(plural(len(rows), "process", "processes") + marked)
    table = _table("", "PID", "user", "GPU", "memory", "CPU", "age", "command")
    for gpu, process in sorted(rows, key=lambda row: (not is_mine(row[1]), -(row[1].memory or 0))):
        since = None if process.started is None else reading.time - process.started
        cells = [YOURS if is_mine(process) else "", str(process.pid), tame(process.user), str(gpu)]
        cells += [amount(process.memory), number(process.cpu, "%"), age(since), _command(process)]
        table.add_row(*map(Text, cells), style="bold green" if is_mine(process) else "")
    yield table


def _command(process: Process) -> str:
    """What runs; where the process cannot be seen from here, that."""
    return tame(process.command or process.name) if process.command or process.name else "not visible from here"


def _ranks(run: RankRun, now: float) -> Iterator[RenderableType]:
    """A run on several ranks: for whom the others wait, and a line for each rank of this host, that one first."""
    rate = "" if run.items_per_second is None else f" · {run.items_per_second:,.0f} items/s"
    yield _title(f"{plural(run.ranks, 'rank')} of {tame(run.program)}{rate}")
    if run.words:
        yield Text.assemble(BADGE, " ", (run.words, "bold"))
    table = _table("", "rank", "host", "device", "step", "items/s", "waits", "line")
    for each in sorted(run.by_rank, key=lambda each: each.rank != run.straggler):
        is_slow = each.rank == run.straggler
        silent = now - each.time
        where = f"silent for {age(silent)}" if silent > SILENT else tame(each.line)
        cells = ["!" if is_slow else "", str(each.rank), tame(each.host), tame(each.device), number(each.step)]
        cells += [number(each.items_per_second), number(each.waiting, "%"), where]
        table.add_row(*map(Text, cells), style="bold yellow" if is_slow else "")
    yield table
    if missing := run.ranks - len(run.by_rank):
        yield Text(f"… and {plural(missing, 'more rank')}", style="dim")
