"""Do the intervals of predicted memory hold what they state? Each training as if the tables knew less of it.

python benchmarks/predictions/leave_out.py --table leave_out.md       # seconds, from what is stored
python benchmarks/predictions/leave_out.py --simulate                 # a quarter of an hour: what trainings ask for

No training is in a table: the tables hold single operations. So a training is left out by leaving out what lies near
it: every convolution is looked up as if nothing within a distance had been measured, and operations that no other
measured training has count as unknown. A distance of 1 is half a doubling of the input's channels.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cases import CAPS, CASES, GIB, STEPS, Training
from compare import lines

from hotloop.apps.simulate.cards import Card, card
from hotloop.apps.simulate.convolution_workspaces import Case
from hotloop.apps.simulate.library_memory import TABLES, constants_for, measured_operations
from hotloop.apps.simulate.need import Need
from hotloop.apps.simulate.running import Simulator
from hotloop.apps.simulate.simulation_record import Peak, PeakInterval
from hotloop.apps.simulate.uncertainty import Spread, verdict
from hotloop.apps.simulate.workspaces import Asked, planned
from hotloop.records.files import write_json, write_whole

RESULTS = Path(__file__).resolve().parents[1] / "results"
ASKED = RESULTS / "asked_h200.json.gz"
PREDICTED, MEASURED = RESULTS / "predictions_h200.json", RESULTS / "measurements_h200.json"
OPERATIONS = TABLES / "operations-2.11.json"
DISTANCES = (0.0, 1.0, 4.0, 8.0)
_NARROW = 0.07  # width that is not shown
TORCH = "2.11"  # with which the GPU was measured
Found = dict[str, Any]


@dataclass(frozen=True)
class Held:
    """One training with one batch, predicted with a part of the tables left out, beside what was measured."""

    key: str
    predicted: Peak
    interval: PeakInterval
    measured: Found
    verdicts: tuple[tuple[bool | None, bool], ...]  # what is said of each cap, and what is true

    def inside(self, figure: str = "allocated") -> bool:
        low, high = self.ends(figure)
        return low <= int(self.measured[figure]) <= high

    def error(self, figure: str = "allocated") -> float:
        """By what share the prediction is off."""
        return float(getattr(self.predicted, figure) / self.measured[figure] - 1)

    def width(self, figure: str = "allocated") -> float:
        low, high = self.ends(figure)
        return float((high - low) / getattr(self.predicted, figure))

    def ends(self, figure: str = "allocated") -> tuple[int, int]:
        return getattr(self.interval.low, figure), getattr(self.interval.high, figure)


def left_out(beyond: float, asked: Found, predictions: Found, measurements: Found) -> list[Held]:
    """Every training with nothing nearer than `beyond` in the tables; with 0, the tables as they are."""
    return [
        _held(key, told, predictions["predictions"][key], measurements, beyond)
        for key, told in asked["trainings"].items()
    ]


def _held(key: str, told: Found, before: Found, measurements: Found, beyond: float) -> Held:
    spread, allocated = Spread(), told["without"]
    spread.saw(allocated)
    constants = constants_for(_card(), TORCH)
    for keys, case, x, weight, y, beside in told["convolutions"]:
        found = planned(Asked(tuple(keys), Case(*case), x, weight, y), constants, beyond)
        allocated = max(allocated, beside + found.bytes)
        _see(spread, Need(found.bytes, "", low=found.low, high=found.high), beside)
    for name, reach in told["operations"].items() if beyond else ():
        if not {*measured_operations().get(name, ())} - {key.partition(" ")[0]}:
            _see(spread, Need(0, "", low=0, high=reach), 0)
    predicted = Peak(allocated, before["reserved"], before["process"])
    interval = spread.interval(predicted)
    measured, said = measurements["measurements"][key], []
    for cap in CAPS:
        run = measurements["capped"].get(f"{key} {cap}")
        fits = True if measured["reserved"] <= cap * GIB else run and run["fits"]
        if fits is not None:
            said.append((_said(before["fits"][str(cap)], interval, allocated, cap * GIB, constants.margin), fits))
    return Held(key, predicted, interval, measured, (*said,))


def _said(simulated: bool | None, interval: PeakInterval, predicted: int, cap: int, margin: float) -> bool | None:
    """The verdict: what the simulated allocator said under the cap, as far as the interval lets it stand."""
    if simulated:
        return verdict(interval, cap, margin)
    sure = interval.low.allocated > min(cap, (1 - margin) * predicted)
    return False if simulated is False and sure else None


def _see(spread: Spread, need: Need, allocated: int) -> None:
    spread.hold(need, None, allocated)
    spread.saw(allocated + need.bytes)
    spread.release(need)


@lru_cache(maxsize=1)
def _card() -> Card:
    return card("h200")


def table_of(levels: dict[float, list[Held]]) -> str:
    """How often the intervals hold, and how wide they are, as Markdown; `levels` are by distance."""
    every = [each for held in levels.values() for each in held]
    rows = [row_of(beyond, held) for beyond, held in levels.items()]
    head = ("nothing measured within", "off by over 5%", "inside", "median width", "nine of ten below",
            "too close", "wrong")  # fmt: skip
    _, inside, middle, nearly_all, *_ = _row(levels[0.0], "reserved")
    by_key = [dict(zip(levels, row, strict=True)) for row in zip(*levels.values(), strict=True)]
    wide = [row for row in by_key if any(each.width() > _NARROW for each in row.values())]
    cells = [
        (row[0.0].key.replace(" ", ", "), f"{row[0.0].measured['allocated'] / GIB:.2f}", *map(_cell, row.values()))
        for row in wide
    ]
    parts = [
        lines(head, [*rows, ("**all**", *_row(every))]),
        f"What is reserved, with all tables: {inside} inside, a median width of {middle}, nine of ten below"
        f" {nearly_all}.",
        f"The stated intervals of what is allocated, in GiB, **bold** where the measured peak is outside. Those of the"
        f" other {len(by_key) - len(wide)} are narrower than {_NARROW:.0%} at every distance.",
        lines(("training, batch", "measured", *map(_words, levels)), cells),
    ]
    return "\n\n".join(parts) + "\n"


def row_of(beyond: float, held: Sequence[Held]) -> tuple[str, ...]:
    """A line of the table."""
    return (_words(beyond), *_row(held))


def _words(beyond: float) -> str:
    return f"{beyond:g}" if beyond else "0: all tables"


def _row(held: Sequence[Held], figure: str = "allocated") -> tuple[str, ...]:
    inside, widths = sum(each.inside(figure) for each in held), sorted(each.width(figure) for each in held)
    verdicts = [pair for each in held for pair in each.verdicts]
    close = sum(said is None for said, _ in verdicts)
    wrong = sum(said is not None and said != true for said, true in verdicts)
    return (
        f"{sum(abs(each.error(figure)) > 0.05 for each in held)}",
        f"{inside} of {len(held)} ({inside / len(held):.0%})",
        f"{statistics.median(widths):.1%}",
        f"{widths[int(0.9 * len(widths))]:.0%}",
        f"{close} of {len(verdicts)} ({close / len(verdicts):.0%})",
        f"{wrong}",
    )


def _cell(held: Held) -> str:
    low, high = held.ends()
    words = f"{low / GIB:.2f} to {high / GIB:.2f}"
    return words if held.inside() else f"**{words}**"


def read(path: Path) -> Found:
    text = path.read_bytes()
    found: Found = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
    return found


def simulate(path: Path) -> None:
    """Note what every training asks of the tables, and the operations that they have."""
    told: Found = read(path) if path.exists() else {"card": _card().key, "trainings": {}}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    for case, batch in [(each, batch) for each in CASES for batch in each.batches]:
        key = f"{case.name} {batch}"
        if key not in told["trainings"]:
            with Simulator(stdout=subprocess.DEVNULL) as simulator:
                told["trainings"][key], _ = asked_by(simulator, case, batch)
            print(key, flush=True)
            write_whole(path, gzip.compress(json.dumps(told).encode(), mtime=0))
    write_json(OPERATIONS, {"source": "the trainings of benchmarks/predictions", "operations": operations_of(told)})


def asked_by(simulator: Simulator, case: Training, batch: int) -> tuple[Found, PeakInterval]:
    """What a training asks of the tables, and the interval of its peak."""
    arguments = ["--batch", str(batch), "--steps", str(STEPS)]
    found = simulator.run(
        case.script, arguments, _card(), steps=STEPS, time_limit=600, listeners=("asked:Asking",), timed=False
    )
    assert found.interval is not None
    told: Found = json.loads(found.notes[-1])
    return told, found.interval


def operations_of(asked: Found) -> dict[str, list[str]]:
    """The operations of the trainings, and which trainings have them."""
    found: dict[str, list[str]] = {}
    for key, told in asked["trainings"].items():
        for name in told["operations"]:
            found.setdefault(name, []).append(key.partition(" ")[0])
    return {name: sorted({*trainings}) for name, trainings in sorted(found.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="note again what trainings ask for, where it is absent")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table here")
    arguments = parser.parse_args()
    if arguments.simulate:
        simulate(ASKED)
    stored = [read(path) for path in (ASKED, PREDICTED, MEASURED)]
    table = table_of({beyond: left_out(beyond, *stored) for beyond in DISTANCES})
    if arguments.table:
        write_whole(arguments.table, table.encode())
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
