"""`Plan`: the frozen record of every setting of a run, and `Tuning`: how it was found. A `Loop` carries a plan out."""

from dataclasses import dataclass
from typing import Literal, get_args

from hotloop.errors import BadArgument
from hotloop.records import Record

Precision = Literal["fp32", "bf16", "fp16"]
Stream = Literal["auto", "direct", "prefetched", "resident"]
Compile = Literal["off", "default", "max-autotune"]
Tier = Literal["A", "B", "C"]
Verdict = Literal["kept", "dropped", "not tried"]


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
    micro_batch: int | None = None  # items of a batch that are computed at once; None for all that fit
    stream: Stream = "auto"  # how batches reach the device; "auto" decides for each loader
    pinned: bool = False  # the loader puts its batches into pinned memory
    workers: int | None = None  # processes that load batches; None leaves it to the loader
    fused: bool = False  # the optimizer updates all weights in one kernel
    tf32: bool = False  # matrix products round their inputs to 10 bits of mantissa
    channels_last: bool = False  # images and the weights of convolutions lie with their channels together
    flipped: bool = False  # gradients of convolutions are computed as convolutions with flipped weights
    cudnn_benchmark: bool = False  # the fastest convolution is found by trying
    compile: Compile = "off"
    graph: int = 0  # steps in one CUDA graph: 0 for no graph, more than 1 only inside `fit`
    checkpointing: bool = False  # activations of all repeated blocks are computed again instead of kept
    recompute: tuple[str, ...] = ()  # names of the modules whose activations are computed again instead of kept
    memory_budget: int | str | None = None  # bytes for the run, such as "8GiB"; `recompute` is chosen to keep it

    def __post_init__(self) -> None:
        for name, kind in (("precision", Precision), ("stream", Stream), ("compile", Compile)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise BadArgument(f"unknown {name} {value!r}", fix=f"choose one of: {', '.join(known)}")
        for name, least in (("accumulate", 1), ("micro_batch", 1), ("graph", 0), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadArgument(f"{name}={value}", fix=f"give a whole number of at least {least}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadArgument(f"clip_norm={self.clip_norm}", fix="give a norm above 0, or None for no clipping")


@dataclass(frozen=True)
class Trial(Record):
    """One lever as the tuner met it."""

    lever: str
    tier: Tier
    verdict: Verdict
    why: str
    gain: float | None = None  # times faster than the plan before it; None where it was not timed
    low: float | None = None  # of the gain, over the rounds
    high: float | None = None
    step: float | None = None  # seconds of a step with it
    cost: float | None = None  # seconds to pull it: a compile, a capture
    drift: float | None = None  # how far the loss went from the run in fp32, as a share


@dataclass(frozen=True)
class Tuning(Record):
    """How a plan was found: every lever with what it gave, from the plain loop to the plan."""

    plan: Plan
    trials: tuple[Trial, ...]
    plain_step: float | None  # seconds of a step of the plain loop, None where it was not timed
    step: float | None  # of the plan
    steps: int | None  # of the run that it was made for; None where that was unknown
    seconds: float  # that the tuning took
    device_name: str
    model: str  # its class
    made: str  # ISO 8601, UTC
    versions: dict[str, str]

    @property
    def gain(self) -> float | None:
        """Times faster than the plain loop."""
        return self.plain_step / self.step if self.plain_step and self.step else None
