"""`Plan`: the frozen record of every setting of a run, and `Tuning`: how it was found. A `Loop` carries a plan out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from hotloop.errors import BadArgument
from hotloop.records import Record

Precision = Literal["fp32", "bf16", "fp16"]
Stream = Literal["auto", "direct", "prefetched", "resident"]
Compile = Literal["off", "default", "max-autotune"]
Tier = Literal["A", "B", "C"]
Verdict = Literal["kept", "dropped", "not tried"]
Split = Literal["auto", "items", "off"] | int | Callable[[Any, int, int], Any]
SPLITS = ("auto", "items", "off")


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
    # How a batch is cut into micro-batches, and what they weigh. "auto" finds out and compares with the whole batch;
    # "items" weighs by items, whatever differs; "off" never cuts. A number is the dimension that holds the items, as 1
    # does where time comes first. A function `(batch, start, stop)` returns the part, or `(part, weight)`.
    split: Split = "auto"

    def __post_init__(self) -> None:
        self._check_split()
        for name, kind in (("precision", Precision), ("stream", Stream), ("compile", Compile)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise BadArgument(f"unknown {name} {value!r}", fix=f"choose one of: {', '.join(known)}")
        for name, least in (("accumulate", 1), ("micro_batch", 1), ("graph", 0), ("workers", 0)):
            value = getattr(self, name)
            if value is None and name in ("micro_batch", "workers"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadArgument(f"{name}={value!r}", fix=f"give a whole number of at least {least}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadArgument(f"clip_norm={self.clip_norm}", fix="give a norm above 0, or None for no clipping")

    def _check_split(self) -> None:
        split = self.split
        dimension = isinstance(split, int) and not isinstance(split, bool) and split >= 0
        if not (dimension or callable(split) or (isinstance(split, str) and split in SPLITS)):
            raise BadArgument(
                f"split={split!r}",
                fix='choose "auto", "items" or "off", the dimension that holds the items (a whole number, from 0), or a'
                " function (batch, start, stop) → part or (part, weight)",
            )
        if split == "off" and self.micro_batch is not None:
            raise BadArgument(
                f'micro_batch={self.micro_batch} and split="off", which never cuts a batch', fix="give one of them"
            )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """A plan from JSON; of a function that cuts batches only the name is there, so it begins with "auto"."""
        split = data.get("split", "auto")
        return super().from_json({**data, "split": split if isinstance(split, int) or split in SPLITS else "auto"})


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
