"""Batches on the device, where they come from, and where they go on after a stop."""

from hotloop.data.epochs import Position, Resumption
from hotloop.data.origin import BatchOrigin, length_of
from hotloop.data.streams import Stream, stream
from hotloop.data.worker_count import WorkersAdvice, workers_for

__all__ = [
    "BatchOrigin",
    "Position",
    "Resumption",
    "Stream",
    "WorkersAdvice",
    "length_of",
    "stream",
    "workers_for",
]
