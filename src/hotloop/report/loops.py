"""Training loops and how fast they are, as a table, a picture, a sentence and a page."""

from dataclasses import dataclass, field
from itertools import compress

from rich.table import Table as RichTable
from rich.text import Text

from hotloop.printing.markup import bars
from hotloop.printing.text import count, printable
from hotloop.profiling.pace import REPEATS, LoopPace
from hotloop.records import Record
from hotloop.report import words
from hotloop.report.document import Block, Document, Drawing, Table
from hotloop.report.run_summary import lined
from hotloop.report.runs import Run
from hotloop.report.tuning import half_spread
from hotloop.report.words import DASH, TIMES, Fact, times

WAY_NAMES = {"tutorial": "as in tutorials", "fit": "loop.fit"}
HEADER = ["device", "loop", "items/s", "±", f"{TIMES} tutorial", f"{TIMES} CPU", "plan"]


@dataclass(frozen=True)
class LoopsTimed(Record):
    """One model's training loop, timed on devices."""

    model: str
    seconds: float  # for each pace, its warm-up included
    paces: tuple[LoopPace, ...]
    devices: dict[str, str]  # name → its product name
    started: str  # ISO 8601, UTC
    versions: dict[str, str] = field(default_factory=dict)

    def tutorial(self, device: str) -> LoopPace | None:
        """The loop as tutorials write it, on a device."""
        return next((each for each in self.paces if each.device == device and each.way == "tutorial"), None)

    @property
    def fastest(self) -> LoopPace | None:
        """The fastest of all that did not fail."""
        return max((each for each in self.paces if each.rate), key=lambda each: each.rate or 0.0, default=None)


def loops_words(timed: LoopsTimed) -> str:
    """The answer, in a sentence."""
    best = timed.fastest
    if best is None:
        return "no loop could be timed"
    against = []
    beside, base = timed.tutorial(best.device), timed.tutorial("cpu")
    if best.way != "tutorial" and (gain := best.times(beside)) is not None:
        against.append(f"{times(gain)} the tutorial's loop there")
    if best.device != "cpu" and (gain := best.times(base)) is not None:
        against.append(f"{times(gain)} the tutorial's loop on the CPU")
    told = f"{WAY_NAMES[best.way]} on {best.device}: {count(best.rate or 0.0)} items/s"
    return ", ".join([told, *against])


def method_words(timed: LoopsTimed) -> str:
    """How it was measured."""
    each = f"{timed.seconds:.2g} s"
    return (
        f"Medians of {REPEATS} repeats after a warm-up, {each} for each loop, the device idle at both ends. loop.fit"
        f" plans for a run of {each}: a longer one may be faster."
    )


def loops_table(timed: LoopsTimed) -> RichTable:
    """A row for each loop on each device."""
    header, rows = _cells(timed)
    last = len(header) - 1
    table = lined(header, words=(0, 1, last), wraps=(last,))
    for pace, cells in zip(timed.paces, rows, strict=True):
        style = "dim" if pace.failure else "bold" if pace is timed.fastest else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _cells(timed: LoopsTimed) -> tuple[list[str], list[list[str]]]:
    """The header and the rows; the comparison with the CPU where there is another device."""
    shown = [name != f"{TIMES} CPU" or {"cpu"} < timed.devices.keys() for name in HEADER]
    return [*compress(HEADER, shown)], [[*compress(_row(timed, each), shown)] for each in timed.paces]


def _row(timed: LoopsTimed, pace: LoopPace) -> list[str]:
    low, high = (min(pace.rates), max(pace.rates)) if pace.rates else (None, None)
    gains = [pace.times(timed.tutorial(device)) for device in (pace.device, "cpu")]
    how = printable(pace.failure) if pace.failure else ", ".join(pace.plan)
    rate = DASH if pace.rate is None else count(pace.rate)
    ratios = [DASH if gain is None else times(gain) for gain in gains]
    return [pace.device, WAY_NAMES[pace.way], rate, half_spread(pace.rate, low, high), *ratios, how]


def loops_page(timed: LoopsTimed, command: str | None = None) -> str:
    """The loops on a page."""
    header, rows = _cells(timed)
    best = timed.fastest
    speeds = [
        (f"{pace.device}: {WAY_NAMES[pace.way]}", pace.rate or 0.0, "failed" if pace.failure else row[2])
        for pace, row in zip(timed.paces, rows, strict=True)
    ]
    blocks: list[Block] = [
        Drawing("How fast each loop is, in items per second", bars(speeds)),
        Table("Every loop", header, rows, method_words(timed), (0, 1, len(header) - 1)),
    ]
    facts = [Fact("device", device, name) for device, name in timed.devices.items()]
    if best is not None:
        facts.insert(
            0, Fact("fastest", f"{count(best.rate or 0.0)} items/s", f"{WAY_NAMES[best.way]} on {best.device}")
        )
    return Document(
        f"{timed.model}: its training loop, timed",
        blocks,
        facts,
        loops_words(timed),
        command=command,
        versions=timed.versions,
        when=words.when(timed.started),
    ).html()


def loops_run(timed: LoopsTimed) -> Run:
    """The entry of a benchmark."""
    figures = {f"{each.device}, {WAY_NAMES[each.way]}: items per second": each.rate for each in timed.paces}
    known = {name: value for name, value in figures.items() if value is not None}
    return Run("bench", timed.model, timed.started, ", ".join(timed.devices.values()), known)
