"""Training loops and how fast they are, as a table, a picture, a sentence and a page."""

from dataclasses import dataclass, field

from hotloop.printing.markup import bars
from hotloop.printing.text import count
from hotloop.profiling.pace import REPEATS, LoopPace
from hotloop.records import Record
from hotloop.report.document import Document, Drawing, Fact, Table
from hotloop.report.runs import Run
from hotloop.report.words import DASH, TIMES, half_spread, times, when

WAY_NAMES = {"tutorial": "as in tutorials", "fit": "loop.fit"}


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


def loops_table(timed: LoopsTimed) -> Table:
    """A row for each loop on each device; the comparison with the CPU where there is another device."""
    against = ["tutorial", *(["CPU"] if {"cpu"} < timed.devices.keys() else [])]
    header = ["device", "loop", "items/s", "±", *(f"{TIMES} {other}" for other in against), "plan"]
    rows, styles = [], {}
    for number, pace in enumerate(timed.paces):
        low, high = (min(pace.rates), max(pace.rates)) if pace.rates else (None, None)
        gains = [pace.times(timed.tutorial(device)) for device in (pace.device, "cpu")[: len(against)]]
        ratios = [DASH if gain is None else times(gain) for gain in gains]
        rate = DASH if pace.rate is None else count(pace.rate)
        how = pace.failure or ", ".join(pace.plan)
        rows.append([pace.device, WAY_NAMES[pace.way], rate, half_spread(pace.rate, low, high), *ratios, how])
        styles[number] = "dim" if pace.failure else "bold" if pace is timed.fastest else ""
    return Table("Every loop", header, rows, method_words(timed), (0, 1, len(header) - 1), styles)


def loops_page(timed: LoopsTimed, command: str | None = None) -> str:
    """The loops on a page."""
    best = timed.fastest
    speeds = [
        (f"{pace.device}: {WAY_NAMES[pace.way]}", pace.rate or 0.0, "failed" if pace.rate is None else count(pace.rate))
        for pace in timed.paces
    ]
    facts = [Fact("device", device, name) for device, name in timed.devices.items()]
    if best is not None:
        what = f"{WAY_NAMES[best.way]} on {best.device}"
        facts.insert(0, Fact("fastest", f"{count(best.rate or 0.0)} items/s", what))
    return Document(
        f"{timed.model}: its training loop, timed",
        [Drawing("How fast each loop is, in items per second", bars(speeds)), loops_table(timed)],
        facts,
        loops_words(timed),
        command=command,
        versions=timed.versions,
        when=when(timed.started),
    ).html()


def loops_run(timed: LoopsTimed) -> Run:
    """The entry of a benchmark."""
    figures = {f"{each.device}, {WAY_NAMES[each.way]}: items per second": each.rate for each in timed.paces}
    return Run.of("bench", timed.model, timed.started, ", ".join(timed.devices.values()), figures)
