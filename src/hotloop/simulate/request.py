"""What the process that simulates is asked to do."""

from dataclasses import dataclass, field
from typing import Any

from hotloop.records import Record


@dataclass(frozen=True)
class Request(Record):
    """A script, a card, and where the result goes."""

    script: str
    arguments: tuple[str, ...]
    card: dict[str, Any]
    result: str  # the file for the result
    steps: int = 3
    time_limit: float = 120.0
    memory_limit: int | None = None  # bytes of host memory
    listeners: tuple[str, ...] = field(default=())  # module:name, called with the card
    values: bool = False  # whether they are computed too
    batch: int | None = None  # that the script is to have
    batch_from: str | None = None  # where it says its batch; None: wherever that is found
    variant: str | None = None  # a change, as in `variants`
    gpus: int = 1  # of the simulated machine
    turned: tuple[tuple[str, int], ...] = ()  # branches on invented numbers, by file and line, that go the other way
    kept: dict[str, float] = field(default_factory=dict)  # seconds of the host in each step by kind, if measured before
    workers: int = 0  # that made the batches then
    silent: bool = False  # whether what the script prints is thrown away
