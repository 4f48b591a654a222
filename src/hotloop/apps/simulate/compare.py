"""Cards side by side for the same training: does it fit, how fast, and what does a million samples cost."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.simulation_record import Simulation, StepTime
from hotloop.errors import BadArgument
from hotloop.printing.text import printable
from hotloop.records import Record

_FIX = 'JSON such as {"h200": 3.5, "t4": 0.35}, or lines such as h200,3.5: dollars per hour'


@dataclass(frozen=True)
class RateInterval(Record):
    """Something that follows from a step's time, with its interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row(Record):
    """A training on one card; what is unknown is None."""

    gpu: str
    fits: bool | None
    largest_batch: int | None
    step_ms: StepTime | None
    samples_per_second: RateInterval | None = None  # at the pace below
    dollars_per_hour: float | None = None
    dollars_per_million: RateInterval | None = None
    pace_ms: StepTime | None = None  # the step with data and the script's own work on the host


def row_of(simulation: Simulation, prices: Mapping[str, float] | None = None) -> Row:
    """What one simulation says of a card; speed and cost are those of the batch that it ran with."""
    step = None if simulation.fits is False else simulation.step_ms
    pace = simulation.pace.step_ms if step and simulation.pace else step
    samples = simulation.batch.samples if simulation.batch else None
    speed = _speed(pace, samples) if pace and samples else None
    price = price_of(simulation.gpu, prices or {})
    cost = None
    if speed and price is not None:
        cost = RateInterval(*(1e6 * price / 3600 / rate for rate in (speed.median, speed.high, speed.low)))
    return Row(simulation.gpu, simulation.fits, simulation.largest_batch, step, speed, price, cost, pace)


def ranking(rows: Sequence[Row]) -> list[list[str]]:
    """Cards from the quickest to the slowest; those whose intervals overlap are one rank, since nobody can tell.

    >>> times = {"t4": 30, "l4": 12, "h200": 10}
    >>> ranking([Row(key, True, None, None, pace_ms=StepTime(t, 0.8 * t, 1.2 * t, True)) for key, t in times.items()])
    [['h200', 'l4'], ['t4']]
    """
    paces = sorted((row.pace_ms.low, row.pace_ms.high, row.gpu) for row in rows if row.pace_ms is not None)
    ranks: list[list[str]] = []
    slowest = -math.inf  # of the rank before
    for low, high, gpu in paces:
        if low > slowest:
            ranks.append([])
        ranks[-1].append(gpu)
        slowest = max(slowest, high)
    return ranks


def price_of(key: str, prices: Mapping[str, float]) -> float | None:
    """The price of a card, however the file of prices spells it.

    >>> price_of("rtx4090", {"nvidia rtx 4090": 0.7})
    0.7
    """
    for name, price in prices.items():
        with suppress(BadArgument):
            if name == key or card(name).key == key:
                return price
    return None


def _speed(step: StepTime, samples: int) -> RateInterval | None:
    if min(step.low, step.median, step.high) <= 0:
        return None
    return RateInterval(*(1e3 * samples / milliseconds for milliseconds in (step.median, step.high, step.low)))


def read_prices(path: Path) -> dict[str, float]:
    """Dollars per hour by card, from a small JSON or CSV file."""
    try:
        text = path.read_text(encoding="utf-8")
        pairs = json.loads(text) if text.lstrip().startswith("{") else dict(_lines(text))
        prices = {str(name).strip().lower(): float(price) for name, price in pairs.items()}
    except (OSError, ValueError, TypeError) as error:
        raise BadArgument(
            f"cannot read the prices in {printable(str(path))}: {printable(str(error))}", fix=_FIX
        ) from error
    if not prices:
        raise BadArgument(f"there is no price in {printable(str(path))}", fix=_FIX)
    for name, price in prices.items():
        if not (math.isfinite(price) and price >= 0):
            raise BadArgument(f"{printable(str(path))}: {price} is no price for {printable(name)}", fix=_FIX)
    return prices


def _lines(text: str) -> list[tuple[str, str]]:
    rows = [row for row in csv.reader(text.splitlines()) if row and not row[0].lstrip().startswith("#")]
    if rows and len(rows[0]) == 2 and not _number(rows[0][1]):
        rows = rows[1:]  # a heading
    return [(name, price) for name, price in rows]


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
