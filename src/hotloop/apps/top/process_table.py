"""The processes on all GPUs: chosen, sorted and arranged in columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from hotloop.apps.top.bars import rule
from hotloop.apps.top.cells import UNKNOWN, age, amount, cropped, known, left, percent, right, tame
from hotloop.apps.top.view_options import ViewOptions
from hotloop.monitor.reading import Process, Reading
from hotloop.printing.text import plural

YOURS = "▸"  # before a process of the person who looks
LETTERS = {"compute": "C", "graphics": "G", "both": "C+G"}  # as nvidia-smi has them
NARROW, WIDE = 70, 110  # terminals that have no room for the type, and those that have room for it in full


@dataclass(frozen=True)
class ProcessRow:
    """A process on one GPU."""

    gpu: int
    process: Process

    def is_of(self, person: str | None) -> bool:
        """Whether it is this program's, or of a person."""
        return self.process.ours or (person is not None and self.process.user == person)

    @property
    def told(self) -> str:
        """The command, and which rank it is; where the process cannot be seen from here, that."""
        if self.process.command or self.process.name:
            rank = "" if self.process.rank is None else f"rank {self.process.rank} of {self.process.ranks}: "
            return rank + tame(self.process.command or self.process.name)
        return "not visible from here"


def _last(value: Any) -> tuple[bool, Any]:
    """A key for sorting in which what is not known comes last."""
    return value is None, value if value is not None else 0


def _most(value: float | None) -> tuple[bool, float]:
    return known(value) is None, -(known(value) or 0)


ORDERS: dict[str, Callable[[ProcessRow], Any]] = {
    "memory": lambda row: _most(row.process.memory),
    "CPU": lambda row: _most(row.process.cpu),
    "age": lambda row: _last(known(row.process.started)),
    "user": lambda row: (row.process.user is None, row.process.user or ""),
    "PID": lambda row: row.process.pid,
    "GPU": lambda row: row.gpu,
}


def rows(reading: Reading, options: ViewOptions) -> list[ProcessRow]:
    """The processes that are wanted, in the order that is wanted; in equal cases by memory."""
    wanted = options.user.casefold()
    found = [
        ProcessRow(gpu.index, process)
        for gpu in reading.gpus
        for process in gpu.processes or ()
        if wanted in (process.user or "").casefold()
    ]
    found.sort(key=lambda row: (ORDERS["memory"](row), row.gpu, row.process.pid))
    return sorted(found, key=ORDERS[options.sort])


def table(reading: Reading, options: ViewOptions, width: int, lines: int | None) -> list[Text]:
    """The processes in at most so many lines, titles included; nothing where not one has room, or without a GPU."""
    if not reading.gpus or (lines is not None and lines < 3):
        return []
    chosen = rows(reading, options)
    room = len(chosen) if lines is None else lines - 2
    skipped = min(options.skipped, max(len(chosen) - room, 0))
    shown = chosen[skipped : skipped + room]
    position = f"{skipped + 1}–{skipped + len(shown)}" if 0 < len(shown) < len(chosen) else ""
    head = rule(_title(options, chosen), width, position)
    if not chosen:
        return [head, *_nothing(reading, options, width)][:lines]
    columns = list(_columns(reading, chosen, width))
    titles = " ".join(column.put(column.title, column.cells) for column in columns)
    body = [_line(row, columns, options, width) for row in shown]
    return [head, cropped(Text("  " + titles, style="dim"), width), *body][:lines]


@dataclass(frozen=True)
class Column:
    """A column of the table: what it is called, how wide it is, and what it says of a process."""

    title: str
    cells: int
    put: Callable[[str, int], str]  # to the left or to the right
    say: Callable[[ProcessRow], str]


def _columns(reading: Reading, chosen: Sequence[ProcessRow], width: int) -> Iterator[Column]:
    """As many columns as the terminal has room for; the command takes what is left."""
    users = min(max(4, *(cell_len(tame(row.process.user)) for row in chosen)), 12)

    def since(row: ProcessRow) -> float | None:
        return None if row.process.started is None else reading.time - row.process.started

    columns = [
        Column("PID", max(5, *(len(str(row.process.pid)) for row in chosen)), right, lambda row: str(row.process.pid)),
        Column("user", users, left, lambda row: tame(row.process.user)),
    ]
    if len(reading.gpus) > 1:
        columns.append(Column("GPU", 3, right, lambda row: str(row.gpu)))
    if width >= NARROW:
        letters = LETTERS if width < WIDE else {}
        kind = Column(
            "type", 4 if letters else 8, left, lambda row: letters.get(row.process.kind, tame(row.process.kind))
        )
        columns.append(kind)
    columns += [
        Column("memory", 9, right, lambda row: amount(row.process.memory)),
        Column("CPU", 5, right, lambda row: percent(row.process.cpu)),
        Column("age", 8, right, lambda row: age(since(row))),
    ]
    yield from columns
    taken = 2 + sum(column.cells + 1 for column in columns)
    yield Column("command", max(width - taken, 0), left, lambda row: row.told)


def _line(row: ProcessRow, columns: Sequence[Column], options: ViewOptions, width: int) -> Text:
    style = "bold green" if row.is_of(options.me) else ""
    text = " ".join(column.put(column.say(row), column.cells) for column in columns)
    return cropped(Text(f"{YOURS if style else ' '} {text}", style=style), width)


def _title(options: ViewOptions, chosen: Sequence[ProcessRow]) -> str:
    title = f"{plural(len(chosen), 'process', 'processes')} by {options.sort}" if chosen else "processes"
    if options.user:
        title += f", user {tame(options.user)}"
    return f"{title}, {YOURS} yours" if any(row.is_of(options.me) for row in chosen) else title


def _nothing(reading: Reading, options: ViewOptions, width: int) -> list[Text]:
    """Why there are no lines: nobody there, nobody wanted, or nothing known."""
    if options.user:
        why = "None of this user; Esc shows all again." if options.keys else "None of this user."
    elif reading.gpus and all(gpu.processes is None for gpu in reading.gpus):
        why = f"{UNKNOWN}: the driver does not tell which processes use the GPU."
    else:
        why = "No process holds memory of a GPU."
    return [cropped(Text("  " + why, style="dim"), width)]
