"""The screen of `hotloop top`: lines made from a reading, its history and the advice, fitted to a terminal."""

import time
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

from hotloop.apps.top import gpus, process_table, ranks
from hotloop.apps.top.advice import Advice
from hotloop.apps.top.bars import LABEL, gauge, past, rule
from hotloop.apps.top.cells import (
    BETWEEN,
    amount,
    cropped,
    fit,
    left,
    number,
    percent,
    portion,
    rate,
    share,
    tame,
    within,
    wrapped,
)
from hotloop.apps.top.history import History
from hotloop.apps.top.view_options import SORTS, ViewOptions
from hotloop.monitor.reading import Host, Reading
from hotloop.printing.text import plural

# From the richest to the barest: how GPUs are drawn, lines for the host, and the processes that must have room beside.
ARRANGEMENTS = (
    ("tall", 4, 8),
    ("block", 4, 5),
    ("block", 2, 4),
    ("block", 1, 3),
    ("table", 4, 6),
    ("table", 2, 4),
    ("table", 1, 2),
)
NO_GPU = "No GPU is seen here; `hotloop device` says why."
BADGE = "bold black on yellow"


def screen(
    reading: Reading,
    history: History,
    advice: Sequence[Advice],
    *,
    width: int,
    height: int | None,
    options: ViewOptions = ViewOptions(),  # noqa: B008  # frozen
) -> list[Text]:
    """The lines of the screen, none wider than `width`; exactly `height` of them, or as many as it takes."""
    if height is None:
        return [header(reading, width), *_body(reading, history, advice, width, None, options)]
    if height < 3:
        return [header(reading, width), footer(options, width)][:height]
    room = height - 2
    body = _help(width) if options.help else _body(reading, history, advice, width, room, options)
    filled = [*body[:room], *(Text() for _ in range(room - len(body)))]
    return [header(reading, width), *filled, footer(options, width)]


def header(reading: Reading, width: int) -> Text:
    """What machine this is, and when it was looked at."""
    machine = [tame(reading.host.name), f"driver {tame(reading.driver)}"]
    line = Text("hotloop top", style="bold").append(BETWEEN + BETWEEN.join(machine), style="not bold")
    clock = _time(reading.time)
    if line.cell_len + len(clock) + 2 > width:
        clock = clock.rpartition(" ")[2]  # the date gives way to the machine's name
    cropped(line, width - len(clock) - 2)
    line.append(" " * (width - line.cell_len - len(clock))).append(clock, style="not bold dim")
    return cropped(line, width)


def footer(options: ViewOptions, width: int) -> Text:
    """The keys, or the name that is being typed."""
    if options.typed is not None:
        line = Text("only processes of user: ").append(tame(options.typed or " ").replace("–", ""), style="bold")
        return cropped(line.append("▏").append("   Enter shows them · Esc leaves it", style="dim"), width)
    if not options.keys:
        return cropped(Text("Ctrl-C quits", style="dim"), width)
    line = _keys(options, named=True)
    return cropped(line if line.cell_len <= width else _keys(options, named=False), width)


def _keys(options: ViewOptions, *, named: bool) -> Text:
    line = Text()
    for key, what in (("q", "quit"), ("?", "help"), ("f", "filter")):
        line.append(key, style="bold cyan").append(f" {what}  ", style="dim")
    line.append("sort:", style="dim")
    for key, what in SORTS.items():
        chosen = what == options.sort
        line.append(" ").append(key, style="bold cyan reverse" if chosen else "bold cyan")
        line.append(f" {what} " if named else "", style="bold" if chosen else "dim")
    line.rstrip()
    return line


def _body(
    reading: Reading,
    history: History,
    advice: Sequence[Advice],
    width: int,
    room: int | None,
    options: ViewOptions,
) -> list[Text]:
    """Everything between header and footer, in the richest arrangement that has room."""
    told = [
        *_advice(advice, width, None if room is None else max(room // 4, 2)),
        *_notes(reading, width, None if room is None else max(room // 6, 1)),
    ]
    listed = len(process_table.rows(reading, options))
    most = None if room is None else max(room // 3 if reading.gpus else room - 11, 4)  # without one, there is room
    together = ranks.table(reading, width, most)
    for way, lines, least in ARRANGEMENTS:
        drawn = _gpus(reading, history, width, way)
        around = [*drawn, *told, *_host(reading.host, history, width, lines), *together]
        if room is None or len(around) + 2 + min(max(listed, 1), least) <= room:
            left_over = None if room is None else room - len(around)
            return [*around, *process_table.table(reading, options, width, left_over)]
    assert room is not None
    return _squeezed(reading, history, advice, width, room, options)


def _squeezed(
    reading: Reading, history: History, advice: Sequence[Advice], width: int, room: int, options: ViewOptions
) -> list[Text]:
    """Too much for the terminal: the GPUs come first, what is advised is cut short, and processes come last."""
    told = _advice(advice, width, 2, tight=True)
    host = _host(reading.host, history, width, 1)
    drawn = _gpus(reading, history, width, "table")
    together = ranks.table(reading, width, max(room // 6, 1))
    most = max(room - len(told) - len(host) - len(together), 2)
    if len(drawn) > most:
        missing = plural(len(drawn) - most + 1, "more GPU")
        drawn = [*drawn[: most - 1], cropped(Text(f"  … and {missing}", style="dim"), width)]
    around = [*drawn, *told, *host, *together]
    return [*around, *process_table.table(reading, options, width, max(room - len(around), 0))]


def _gpus(reading: Reading, history: History, width: int, way: str) -> list[Text]:
    if not reading.gpus:
        why = [line for note in reading.notes or (NO_GPU,) for line in wrapped(tame(note), width - 2)]
        return [cropped(Text("  ").append(line, style="yellow"), width) for line in why[:4]]
    if way == "table":
        return gpus.table(reading.gpus, history, width)
    return [line for gpu in reading.gpus for line in gpus.block(gpu, history, width, tall=way == "tall")]


def _advice(advice: Sequence[Advice], width: int, most: int | None, *, tight: bool = False) -> list[Text]:
    """Each piece of advice with its fix, as many as there is room for; the others are counted."""
    lines: list[Text] = []
    for index, each in enumerate(advice):
        more = list(_piece(each, width, 1 if tight else None))
        rest = len(advice) - index
        if most is not None and lines and len(lines) + len(more) + (rest > 1) > most:
            return [*lines, cropped(Text(f"    and {plural(rest, 'more piece')} of advice", style="dim"), width)]
        lines += more
    return lines


def _piece(advice: Advice, width: int, most: int | None) -> Iterator[Text]:
    """What is the matter and what to do, each in at most so many lines."""
    for index, words in enumerate(_lines(tame(advice.words), width - 4, most)):
        badge = Text(" ! ", style=BADGE) if index == 0 else Text("   ")
        yield cropped(Text.assemble(badge, " ", (words, "bold")), width)
    for words in _lines(f"fix: {tame(advice.fix)}", width - 4, most) if advice.fix else ():
        yield cropped(Text("    ").append(words, style="cyan"), width)


def _lines(words: str, cells: int, most: int | None) -> list[str]:
    return [fit(words, cells)] if most == 1 else wrapped(words, cells)


def _notes(reading: Reading, width: int, most: int | None) -> list[Text]:
    """What could not be read; without a GPU that is told in its place already."""
    notes = reading.notes if reading.gpus else ()
    return [cropped(Text("  ").append(tame(note), style="dim"), width) for note in notes][:most]


def _host(host: Host, history: History, width: int, lines: int) -> list[Text]:
    """The computer: with bars and curves in four lines, in words in two, the most important of it in one."""
    cores = f"{percent(host.cpu)} of {plural(host.cores, 'core')}" if host.cores else percent(host.cpu)
    memory = portion(host.memory_used, host.memory_total)
    if lines < 4:
        room = width - LABEL - 2
        said = (within([f"CPU {cores}", f"RAM {memory}", f"swap {amount(host.swap_used)}"], room), _traffic(host, room))
        labels = (left("host", LABEL), " " * LABEL)
        return [
            cropped(Text("  ").append(label, style="dim").append(words), width)
            for label, words in list(zip(labels, said, strict=True))[:lines]
        ]
    filled = share(host.memory_used, host.memory_total)
    return [
        rule("host", width),
        gauge("CPU", host.cpu, cores, past(history, history.host("cpu")), width, "magenta"),
        gauge("RAM", filled, memory, past(history, history.host("memory_used"), host.memory_total), width, "magenta"),
        cropped(Text("  " + within([_traffic(host, width - 2), f"swap {amount(host.swap_used)}"], width - 2)), width),
    ]


def _traffic(host: Host, cells: int) -> str:
    """Disk and network in full, or with arrows where that is too long."""
    read, written, received, sent = map(rate, (host.disk_read, host.disk_written, host.net_received, host.net_sent))
    full = f"disk read {read}, written {written}{BETWEEN}network in {received}, out {sent}"
    return (
        full if cell_len(full) <= cells else within([f"disk ↓ {read} ↑ {written}", f"net ↓ {received} ↑ {sent}"], cells)
    )


def _time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return number(None)


def _help(width: int) -> list[Text]:
    """What the keys do and what the marks mean."""
    keys = {
        "q, Ctrl-C": "quit",
        "f": "only processes of a user: type a part of the name, then Enter",
        "Esc": "processes of all users",
        **{key: f"sort processes by {what}" for key, what in SORTS.items()},
        "down, up": "scroll through the processes",
    }
    marks = {
        "–": "not known: the driver does not tell",
        process_table.YOURS: "a process of yours",
        "C, G": "computes, draws",
        "↓ ↑": "to the GPU, read or received; from the GPU, written or sent",
        "waits": "share of an update in which a rank waits for other ranks",
        "utilisation": "share of the time in which some kernel ran, however small",
        "!": "advice, and what to do",
    }
    rows = [*keys.items(), ("", ""), *marks.items(), ("", ""), ("", "Any key goes back.")]
    return [cropped(Text("  ").append(left(mark, 13), style="bold cyan").append(what), width) for mark, what in rows]
