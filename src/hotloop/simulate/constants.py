"""Memory that the libraries under PyTorch take, as it was measured: tables by architecture and torch version."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hotloop.records import Record
from hotloop.simulate.cards import Card

TABLES = Path(__file__).with_name("tables")
MIB = 2**20


@dataclass(frozen=True)
class Constants(Record):
    """Bytes and factors of one architecture under one version of torch."""

    architecture: str  # any: what is taken where nothing was measured
    torch: str  # such as 2.11
    calibrated: bool
    source: str  # how the figures came to be
    context: dict[str, int]  # bytes outside the allocator: base, and what blas, cudnn and attention add at first use
    convolution: dict[str, tuple[float, ...]]  # see `workspaces.convolution`: shares of operands, and a constant
    factors: dict[str, float] = field(default_factory=dict)  # see `workspaces`
    margin: float = 0.04  # share of the memory within which a verdict is not to be trusted


def constants_for(card: Card, torch_version: str) -> Constants:
    """The table of a card's architecture and the nearest version of torch, or the one for any architecture."""
    known = [each for each in tables() if each.architecture == card.architecture]
    if not known:
        known = [each for each in tables() if each.architecture == "any"]
    wanted = _version(torch_version)
    return min(known, key=lambda each: (not each.calibrated, abs(_version(each.torch) - wanted)))


@lru_cache(maxsize=1)
def tables() -> tuple[Constants, ...]:
    """Every table that comes with hotloop."""
    return tuple(read_constants(path) for path in sorted(TABLES.glob("memory-*.json")))


def read_constants(path: Path) -> Constants:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    data["convolution"] = {kind: tuple(shares) for kind, shares in data["convolution"].items()}
    return Constants.from_json(data)


def _version(words: str) -> int:
    """A number by which versions can be compared.

    >>> _version("2.11.0+cu128"), _version("2.13")
    (211, 213)
    """
    major, minor = words.split("+", maxsplit=1)[0].split(".")[:2]
    return 100 * int(major) + int(minor)


class Sample(NamedTuple):
    """What one convolution took, as it was measured."""

    key: str  # such as forward/tf32/first/spatial
    x: int  # bytes of the operands
    weight: int
    y: int
    taken: int  # bytes beside its result


def shares_of(samples: Iterable[Sample]) -> dict[str, tuple[float, ...]]:
    """The factors of every kind of convolution that was measured often enough to fit them."""
    kinds: dict[str, list[Sample]] = {}
    for sample in samples:
        kinds.setdefault(sample.key, []).append(sample)
    found: dict[str, tuple[float, ...]] = {}
    for key, of_kind in sorted(kinds.items()):
        if len(of_kind) >= 3:
            rows = [(each.x, each.weight, each.y, MIB) for each in of_kind]
            x, weight, y, fixed = fit(rows, [each.taken for each in of_kind])
            found[key] = (round(x, 4), round(weight, 4), round(y, 4), float(round(fixed * MIB)))
    return found


def fit(rows: Iterable[Sequence[float]], seen: Iterable[float], rounds: int = 400) -> tuple[float, ...]:
    """Factors of at least 0 that turn rows into what was seen, by least squares relative to the size of each row.

    One factor is moved to its best value at a time, which for factors that cannot be negative ends at the best of all.

    >>> [round(x, 3) for x in fit([(1, 0), (0, 2), (1, 1)], [3, 0, 3])]
    [3.0, 0.0]
    """
    table, target = [tuple(row) for row in rows], list(seen)
    if not table:
        return ()
    weights = [1 / max(sum(row), 1e-12) ** 2 for row in table]
    factors = [0.0] * len(table[0])
    left = list(target)
    for _ in range(rounds):
        moved = 0.0
        for column, before in enumerate(factors):
            weight = sum(w * row[column] ** 2 for w, row in zip(weights, table, strict=True))
            if weight == 0:
                continue
            pull = sum(w * row[column] * rest for w, row, rest in zip(weights, table, left, strict=True))
            factors[column] = max(0.0, before + pull / weight)
            change = factors[column] - before
            left = [rest - change * row[column] for rest, row in zip(left, table, strict=True)]
            moved = max(moved, abs(change))
        if moved < 1e-9:
            break
    return tuple(factors)
