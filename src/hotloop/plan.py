"""`Plan`: the frozen record of every setting of a run, and `Tuning`: how it was found. A `Loop` carries a plan out."""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, Self, TypeVar, get_args

from hotloop.errors import BadArgument
from hotloop.printing import markup
from hotloop.printing.text import an, duration, plural, printable
from hotloop.records import Record

Precision = Literal["fp32", "bf16", "fp16"]
Stream = Literal["auto", "direct", "prefetched", "resident"]
Parallel = Literal["ddp", "fsdp", "data_parallel"]
Compile = Literal["off", "blocks", "default", "max-autotune"]
Tier = Literal["A", "B", "C"]
Verdict = Literal["kept", "dropped", "not tried"]
Split = Literal["auto", "items", "off"] | int | Callable[[Any, int, int], Any]
SPLITS = ("auto", "items", "off")
_DEVICE = re.compile(r"[a-z]+(?::\d{1,4})?", re.ASCII)  # which PyTorch knows is the loop's to say
_SWITCHES = (
    "pinned",
    "fused",
    "tf32",
    "channels_last",
    "cudnn_benchmark",
    "checkpointing",
    "sync_batchnorm",
)
# What others call a precision. Weights that are themselves in half precision ("bf16-true") are something else.
_PRECISIONS = {
    "bf16": ("bf16-mixed", "bfloat16", "torch.bfloat16"),
    "fp16": ("16-mixed", "float16", "half", "16", "torch.float16"),
    "fp32": ("32-true", "float32", "float", "32", "torch.float32"),
}
T = TypeVar("T")


def precision_of(given: object) -> Any:
    """A precision by hotloop's name; what is none stays as it is.

    >>> precision_of("bf16-mixed"), precision_of(32)
    ('bf16', 'fp32')
    """
    return next((name for name, others in _PRECISIONS.items() if str(given) in others), given)


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """A question with the nearest of the names that there are; empty where none is near."""
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}? " if near else ""


def _names_the_nearest(plan: type[T]) -> type[T]:
    """A record that tells a setting it does not have with the nearest; Python names only the unexpected argument."""
    make = plan.__init__
    names = [field.name for field in fields(plan)]  # type: ignore[arg-type]

    @wraps(make)
    def init(self: T, *values: Any, **settings: Any) -> None:
        for unknown in [name for name in settings if name not in names]:
            fix = f"{did_you_mean(unknown, names)}The settings are: {', '.join(names)}"
            raise BadArgument(f"Plan has no setting {printable(unknown)!r}", fix=fix)
        make(self, *values, **settings)

    plan.__init__ = init  # type: ignore[assignment]
    return plan


@_names_the_nearest
@dataclass(frozen=True)
class Plan(Record):
    """How a run computes.

    >>> Plan(accumulate=4).accumulate
    4
    """

    device: str = "auto"  # where it runs, and where a `Loop` runs that is given the plan; "auto" for the loop's
    precision: Precision = "fp32"
    accumulate: int = 1  # batches per update
    clip_norm: float | None = None  # largest norm of the gradient, None for no clipping
    micro_batch: int | None = None  # items of a batch that are computed at once; None for all that fit
    stream: Stream = "auto"  # how batches reach the device; "auto" decides for each loader
    pinned: bool = False  # the loader puts its batches into pinned memory
    workers: int | None = None  # processes that load batches; None leaves it to the loader
    fused: bool = False  # the optimizer updates all weights in one kernel
    tf32: bool = False  # matmuls round their inputs to 10 bits of mantissa
    channels_last: bool = False  # memory format of images and of the weights of convolutions
    cudnn_benchmark: bool = False  # the fastest convolution is found by trying
    compile: Compile = "off"
    graph: int = 0  # steps in one CUDA graph: 0 for no graph, more than 1 only inside `fit`
    checkpointing: bool = False  # activation checkpointing of all repeated blocks
    recompute: tuple[str, ...] = ()  # names of the modules to checkpoint
    # How a batch is cut into micro-batches, and what they weigh. "auto" finds out and compares with the whole batch;
    # "items" weighs by items, whatever differs; "off" never cuts. A number is the dimension that holds the items, as 1
    # does where time comes first. A function `(batch, start, stop)` returns the part, or `(part, weight)`.
    split: Split = "auto"
    levers: tuple[str, ...] = ()  # names of further levers, those without a setting of their own
    # Where torchrun has started several processes: "ddp" gives each the whole model, "fsdp" a part of every block.
    # "data_parallel" spreads the batches of one process over its GPUs, as `nn.DataParallel` does; DDP is faster.
    parallel: Parallel = "ddp"
    sync_batchnorm: bool = False  # batch normalisation over the batches of all ranks, on GPUs
    clip_value: float | None = None  # largest number in the gradient, None for no clipping

    def __post_init__(self) -> None:
        self._check_split()
        self._check_clipping()
        object.__setattr__(self, "precision", precision_of(self.precision))
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise BadArgument(
                f"a plan for the device {self.device!r}, which is not the name of one",
                fix='say where it runs: Plan("cuda", …), "cuda:1", "cpu", "mps" or "xpu"; or leave it to the loop',
            )
        for name, kind in (
            ("precision", Precision),
            ("stream", Stream),
            ("compile", Compile),
            ("parallel", Parallel),
        ):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise BadArgument(f"unknown {name} {value!r}", fix=f"choose one of: {', '.join(known)}")
        for name, least in (("accumulate", 1), ("micro_batch", 1), ("graph", 0), ("workers", 0)):
            value = getattr(self, name)
            if value is None and name in ("micro_batch", "workers"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadArgument(f"{name}={value!r}", fix=f"give a whole number of at least {least}")
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise BadArgument(f"{name}={value!r}", fix="give True or False")
        for name, fix in (
            ("recompute", 'give the names of modules: recompute=("blocks.0",)'),
            ("levers", 'give the names of levers: levers=("name",)'),
        ):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
                raise BadArgument(f"{name}={value!r}", fix=fix)
        object.__setattr__(self, "levers", tuple(sorted(set(self.levers))))  # in whatever order they were pulled

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

    def _check_clipping(self) -> None:
        for name, kind in (("clip_norm", "norm"), ("clip_value", "value")):
            clip = getattr(self, name)
            if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
                raise BadArgument(f"{name}={clip!r}", fix=f"give a {kind} above 0, or None for no clipping")
        if self.clip_norm is not None and self.clip_value is not None:
            raise BadArgument(f"clip_norm={self.clip_norm} and clip_value={self.clip_value}", fix="give one of them")

    def __repr__(self) -> str:
        """The settings that are not the usual ones, as a person would write them.

        >>> Plan("cuda", precision="bf16", graph=16)
        Plan('cuda', precision='bf16', graph=16)
        """
        device = [] if self.device == "auto" else [repr(self.device)]
        return f"Plan({', '.join(device + [f'{name}={value!r}' for name, value in self._unusual()])})"

    def _unusual(self) -> list[tuple[str, Any]]:
        """The settings that are not the usual ones, but for the device."""
        values = [(field, getattr(self, field.name)) for field in fields(self)[1:]]
        return [(field.name, value) for field, value in values if value != field.default]

    def _repr_html_(self) -> str:
        """What a notebook shows: the settings that are not the usual ones, as a table."""
        rows = [("device", self.device), *((name, repr(value)) for name, value in self._unusual())]
        if len(rows) == 1:
            rows.append(("all else", "as usual"))
        return markup.box(markup.line("Plan", strong=True), markup.table(rows, words=(0, 1)))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """A plan from JSON; of a function that cuts batches only the name is there, so it begins with "auto"."""
        if not isinstance(data, dict):
            raise BadArgument(f"{an(type(data).__name__)} in place of a plan", fix="give the settings by name")
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

    def __str__(self) -> str:
        """The plan, what it gains and each lever with its verdict."""
        told = []
        if self.gain is not None:
            told.append(f"{self.gain:.3g} times the plain loop")
        run = "" if self.steps is None else f" for a run of {plural(self.steps, 'step')}"
        lines = [str(self.plan), "; ".join([*told, f"found in {duration(self.seconds)}{run} on {self.device_name}"])]
        lines += [f"  {trial.verdict:9}  {trial.lever}: {trial.why}" for trial in self.trials]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: the same, with the levers as tables; those that were not tried, where one clicks."""
        tried = [
            [
                *(trial.lever, trial.tier),
                *(
                    "" if trial.gain is None else f"{trial.gain:.3g}",
                    "" if trial.step is None else duration(trial.step),
                ),
                *(trial.verdict, trial.why),
            ]
            for trial in self.trials
            if trial.verdict != "not tried"
        ]
        others = [[trial.lever, trial.why] for trial in self.trials if trial.verdict == "not tried"]
        plan, found, *_ = str(self).splitlines()
        header = ["lever", "tier", "times", "step", "verdict", "why"]
        return markup.box(
            markup.line(f"A plan for {self.model}", strong=True),
            markup.line(found),
            markup.line(plan, faint=True),
            markup.table(tried, header, words=(0, 4, 5)) if tried else "",
            markup.folded(f"{plural(len(others), 'lever')} not tried", markup.table(others, words=(0, 1)))
            if others
            else "",
        )
