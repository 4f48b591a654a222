"""What tests of tuning share: runs that are expected to be long, a lever more, and what is told."""

from collections.abc import Iterator
from typing import Any

import pytest

import hotloop
from hotloop.levers import LEVERS, Lever

LONG = 10**6  # batches or epochs


def endless(loop: hotloop.Loop, loader: Any, expected: int = LONG) -> Iterator[Any]:
    """Epoch after epoch of a loop of one's own, which is expected to go on for long."""
    loop._core.data.expected = expected
    while True:
        yield from loop.batches(loader)


def with_lever(lever: Lever, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one lever more."""
    for module in ("levers", "tune.knowledge", "tune.course", "tune.tuner", "tune.tuning_record"):
        monkeypatch.setattr(f"hotloop.{module}.LEVERS", (*LEVERS, lever))
