"""Memory that the libraries under PyTorch take, as it was measured: tables by architecture and torch version."""

import gzip
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from hotloop.apps.simulate.cards import Card
from hotloop.records import Record

TABLES = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Constants(Record):
    """Bytes and factors of one architecture under one version of torch."""

    architecture: str  # any: what is taken where nothing was measured
    torch: str  # such as 2.11
    calibrated: bool
    source: str  # how the figures came to be
    context: dict[str, int]  # bytes outside the allocator: base, and what blas, cudnn and attention add at first use
    convolution: dict[str, tuple[str, ...]]  # part/precision/layout → what was measured: see `ConvolutionTiming`
    factors: dict[str, float] = field(default_factory=dict)  # see `families`
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
    return tuple(read_constants(path) for path in sorted(TABLES.glob("memory-*")))


def measured() -> tuple[Constants, ...]:
    """The tables that were measured on a card."""
    return tuple(each for each in tables() if each.calibrated)


@lru_cache(maxsize=1)
def measured_operations() -> dict[str, tuple[str, ...]]:
    """Operations that ran in trainings whose memory was measured, and in which: by their names in `workspaces`."""
    found = json.loads((TABLES / "operations-2.11.json").read_text())["operations"]
    return {name: tuple(trainings) for name, trainings in found.items()}


def read_constants(path: Path) -> Constants:
    text = path.read_bytes()
    return Constants.from_json(json.loads(gzip.decompress(text) if path.suffix == ".gz" else text))


def _version(words: str) -> int:
    """A number by which versions can be compared.

    >>> _version("2.11.0+cu128"), _version("2.13")
    (211, 213)
    """
    major, minor = words.split("+", maxsplit=1)[0].split(".")[:2]
    return 100 * int(major) + int(minor)
