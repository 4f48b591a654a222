"""The GPUs of a reading as lines: a block for each, or a line for each where there are many."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from hotloop.apps.top.bars import bar, gauge, past, rule
from hotloop.apps.top.cells import (
    BETWEEN,
    cropped,
    fit,
    known,
    left,
    number,
    part,
    percent,
    portion,
    rate,
    right,
    share,
    tame,
    within,
    wrapped,
)
from hotloop.apps.top.history import History
from hotloop.monitor.reading import Gpu

FULL, NEARLY = 97, 85  # percent of memory, in red and in yellow
UTILISATION, MEMORY, TEMPERATURE, POWER = 5, 18, 7, 14  # cells of the columns of a table
SHORTEST_BAR, LONGEST_BAR = 6, 30
NARROW = 72  # terminals that have no room for the power's cap


def block(gpu: Gpu, history: History, width: int, *, tall: bool = False) -> list[Text]:
    """A GPU with bars and a minute of history, in four lines; in five or six where there is room."""
    title = f"GPU {gpu.index} {tame(gpu.name)}"
    if gpu.error is not None:
        told = [Text("  ").append(line) for line in wrapped(tame(gpu.error), width - 2)[:2]]
        return [rule(title, width, style="bold red"), *(cropped(line, width) for line in told)]
    stats = [_temperature(gpu), f"fan {percent(gpu.fan)}", *([] if tall else [_power(gpu)])]
    lines = [
        rule(title, width, within(stats, width - min(cell_len(title), 16) - 8)),
        gauge(
            "utilisation",
            gpu.utilisation,
            percent(gpu.utilisation),
            past(history, history.gpu(gpu.index, "utilisation")),
            width,
        ),
        gauge(
            "memory",
            share(gpu.memory_used, gpu.memory_total),
            _memory(gpu),
            past(history, history.gpu(gpu.index, "memory_used"), gpu.memory_total),
            width,
            _alarm(gpu),
        ),
    ]
    if tall:
        watts = past(history, history.gpu(gpu.index, "power"), gpu.power_limit)
        lines.append(gauge("power", share(gpu.power, gpu.power_limit), _power(gpu), watts, width, "cyan"))
    return [*lines, *_details(gpu, width, 2 if tall else 1)]


@dataclass(frozen=True)
class _Cells:
    """How wide the parts of a table's line are that depend on the terminal and on what there is to say."""

    name: int
    bar: int
    curve: int
    power: int
    held: int

    @classmethod
    def of(cls, gpus: Sequence[Gpu], width: int) -> "_Cells":
        power = POWER if width >= NARROW else POWER // 2
        room = max(width - 5 - UTILISATION - 1 - MEMORY - TEMPERATURE - power, 0)
        name = min(max(cell_len(_short(gpu)) for gpu in gpus), 24, room)
        held = min(max(cell_len(_held(gpu)) for gpu in gpus), 16, max(room - name - 2, 0))
        room -= name + (held + 2 if held else 0)
        bar = min(room // 2, LONGEST_BAR) if room >= 2 * SHORTEST_BAR else 0
        return cls(name, bar, max(room - 2 * bar - 2, 0) if bar == LONGEST_BAR else 0, power, held)


def table(gpus: Sequence[Gpu], history: History, width: int) -> list[Text]:
    """A line for each GPU below a line of titles: what fits when there are many."""
    cells = _Cells.of(gpus, width)
    return [cropped(line, width) for line in (_titles(cells), *(_line(gpu, history, cells) for gpu in gpus))]


def _titles(cells: _Cells) -> Text:
    busy = left("utilisation", cells.bar + UTILISATION) if cells.bar else right("util", UTILISATION)
    gap = " " * ((cells.curve + 2 if cells.curve else 0) + 1 + cells.bar)
    others = right("memory", MEMORY) + right("temp", TEMPERATURE) + right("power", cells.power)
    return Text(f"    {left('GPU', cells.name + 1)}{busy}{gap}{others}", style="dim")


def _line(gpu: Gpu, history: History, cells: _Cells) -> Text:
    line = Text(f" {right(str(gpu.index), 2)} ").append(left(_short(gpu), cells.name + 1), style="bold")
    if gpu.error is not None:
        return line.append(tame(gpu.error), style="red")
    line.append(bar(gpu.utilisation, cells.bar)).append(right(percent(gpu.utilisation), UTILISATION))
    if cells.curve:
        curve = past(history, history.gpu(gpu.index, "utilisation"))
        line.append("  ").append(curve(cells.curve), style="green")
    line.append(" ").append(bar(share(gpu.memory_used, gpu.memory_total), cells.bar, _alarm(gpu)))
    line.append(right(_memory(gpu), MEMORY)).append(right(_temperature(gpu), TEMPERATURE))
    line.append(right(_power(gpu) if cells.power == POWER else number(gpu.power, " W"), cells.power))
    return line.append("  ").append(fit(_held(gpu), cells.held), style="yellow") if cells.held else line


def _details(gpu: Gpu, width: int, most: int) -> list[Text]:
    """What is told in words below the bars: as many lines as are needed and allowed."""
    lines = [""]
    for item in _items(gpu):
        longer = f"{lines[-1]}{BETWEEN}{item}" if lines[-1] else item
        if cell_len(longer) <= width - 2:
            lines[-1] = longer
        elif len(lines) < most:
            lines.append(item)
    shown = [Text("  ").append(line) for line in lines if line]
    if gpu.throttled and shown:
        shown[0].stylize("yellow", 2, 2 + len(_throttling(gpu)))
    return [cropped(line, width) for line in shown]


def _items(gpu: Gpu) -> Iterator[str]:
    """The most telling first, because the last ones may not fit."""
    if gpu.throttled:
        yield _throttling(gpu)
    if gpu.ecc_uncorrected:
        yield f"{gpu.ecc_uncorrected:,} uncorrected ECC errors"
    yield part(number(gpu.clock, " MHz"), number(gpu.clock_most, " MHz"))
    yield f"PCIe ↓ {rate(gpu.received)} ↑ {rate(gpu.sent)}"
    if not gpu.throttled:
        yield _throttling(gpu)
    yield f"memory clock {part(number(gpu.memory_clock, ' MHz'), number(gpu.memory_clock_most, ' MHz'))}"
    if gpu.ecc_corrected is not None or gpu.ecc_uncorrected is not None:
        yield f"ECC errors {number(gpu.ecc_corrected)} corrected, {number(gpu.ecc_uncorrected)} not"


def _throttling(gpu: Gpu) -> str:
    if gpu.throttled is None:
        return "throttling –"
    return f"throttled: {_held(gpu)}" if gpu.throttled else "not throttled"


def _held(gpu: Gpu) -> str:
    """What holds the clocks down; nothing where nothing does."""
    return ", ".join(tame(reason) for reason in gpu.throttled or ())


def _short(gpu: Gpu) -> str:
    return tame(gpu.name).removeprefix("NVIDIA ")


def _temperature(gpu: Gpu) -> str:
    return number(gpu.temperature, " °C")


def _power(gpu: Gpu) -> str:
    return part(number(gpu.power, " W"), number(gpu.power_limit, " W"))


def _memory(gpu: Gpu) -> str:
    return portion(gpu.memory_used, gpu.memory_total)


def _alarm(gpu: Gpu) -> str:
    """The colour of the memory: how near it is to its end."""
    filled = known(share(gpu.memory_used, gpu.memory_total)) or 0
    return "red" if filled >= FULL else "yellow" if filled >= NEARLY else "blue"
