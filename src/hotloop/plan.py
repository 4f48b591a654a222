"""`Plan`: the frozen record of every setting of a run. A `Loop` carries it out."""

from dataclasses import dataclass
from typing import Literal, get_args

from hotloop.errors import BadArgument
from hotloop.records import Record

Precision = Literal["fp32", "bf16", "fp16"]
Stream = Literal["auto", "direct", "prefetched", "resident"]
STREAMS: tuple[str, ...] = get_args(Stream)
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True)
class Plan(Record):
    """How a run computes.

    >>> Plan(device="cpu", accumulate=4).accumulate
    4
    """

    device: str
    precision: Precision = "fp32"
    accumulate: int = 1  # batches per update
    clip_norm: float | None = None  # largest norm of the gradient, None for no clipping
    stream: Stream = "auto"  # how batches reach the device; "auto" decides for each loader

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise BadArgument(f"unknown precision {self.precision!r}", fix=f"choose one of: {', '.join(PRECISIONS)}")
        if self.stream not in STREAMS:
            raise BadArgument(f"unknown stream {self.stream!r}", fix=f"choose one of: {', '.join(STREAMS)}")
        if self.accumulate < 1:
            raise BadArgument(
                f"accumulate={self.accumulate} batches per update", fix="give a whole number of at least 1"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadArgument(f"clip_norm={self.clip_norm}", fix="give a norm above 0, or None for no clipping")
