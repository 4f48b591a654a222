"""Plain frozen records of numbers and strings, to and from JSON: what the engine writes and the reports read."""

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import repeat
from operator import call
from statistics import median
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from hotloop.printing import markup
from hotloop.printing.text import count, duration, metric, plural, printable, size

MOST_ROWS = 50  # epochs that a notebook shows
_AS_THEY_ARE = (int, str, bool)  # in JSON


class Record:
    """A frozen dataclass that goes to JSON and comes back equal."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self, dict_factory=_plain)  # type: ignore[call-overload, no-any-return]  # subclasses are dataclasses

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        hints = get_type_hints(cls)
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: restored(hints[name], value) for name, value in data.items() if name in known})

    def is_sound(self, *, finite: bool = True) -> bool:
        """Whether every field has a value of the type that it declares, and, with `finite`, no number is NaN or inf."""
        hints = get_type_hints(type(self), include_extras=True)
        return all(is_of(hints[f.name], getattr(self, f.name), finite=finite) for f in fields(self))  # type: ignore[arg-type]


def is_of(hint: Any, value: Any, *, finite: bool = True) -> bool:
    """Whether a value is what a type says, as far as records use types."""
    return _type_check(hint, finite)(value)


@cache
def _type_check(hint: Any, finite: bool) -> Callable[[Any], bool]:
    """The check of one type, made once: lists in a checkpoint have thousands of entries."""
    kind, arms = get_origin(hint), get_args(hint)
    if kind is Annotated:
        several = [_type_check(arms[0], finite), *(arm for arm in arms[1:] if callable(arm))]
        return lambda value: all(map(call, several, repeat(value)))
    if kind is Literal:
        return lambda value: any(type(value) is type(arm) and value == arm for arm in arms)
    if kind not in (list, tuple, dict, types.UnionType, Union, None):  # such as a callable, of which JSON holds nothing
        return lambda value: isinstance(value, kind)
    checks = [_type_check(arm, finite) for arm in arms if arm is not Ellipsis]
    if kind in (types.UnionType, Union):
        return lambda value: any(check(value) for check in checks)
    if kind is list or (kind is tuple and arms[-1] is Ellipsis):
        return lambda value: isinstance(value, kind) and all(map(checks[0], value))
    if kind is tuple:
        return lambda value: isinstance(value, tuple) and len(value) == len(checks) and all(map(call, checks, value))
    if kind is dict:
        return lambda value: (
            isinstance(value, dict) and all(map(checks[0], value)) and all(map(checks[1], value.values()))
        )
    if hint is float:
        return lambda value: type(value) in (int, float) and (not finite or math.isfinite(value))
    if isinstance(hint, type) and issubclass(hint, Record):
        return lambda value: isinstance(value, hint) and value.is_sound(finite=finite)
    if hint is Any:
        return lambda value: True
    return lambda value: type(value) is hint or (hint not in _AS_THEY_ARE and isinstance(value, hint))


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a record; of a function only its name."""
    return {
        name: getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
        for name, value in pairs
    }


def restored(hint: Any, value: Any) -> Any:
    """`value` as JSON gave it, in the type that the record declares."""
    if value is None:
        return math.nan if hint is float else None  # JSON has no NaN, and files have null for it
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is types.UnionType:
        hint = next(arm for arm in get_args(hint) if arm is not type(None))
    if is_dataclass(hint) and isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_json(value)
    if get_origin(hint) is tuple:
        arms = get_args(hint)
        if arms[0] in _AS_THEY_ARE and arms[-1] is Ellipsis:  # of which tables have a million
            return tuple(value)
        each = [arms[0]] * len(value) if arms[-1] is Ellipsis else list(arms)
        return tuple(restored(arm, item) for arm, item in zip(each, value, strict=True))
    if get_origin(hint) is list and isinstance(value, list | tuple):
        return [restored(get_args(hint)[0], item) for item in value]
    if get_origin(hint) is dict and isinstance(value, dict):
        return {key: restored(get_args(hint)[1], item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Timing(Record):
    """Repeated measurements of one thing, in seconds per call."""

    median: float
    low: float  # 5th percentile
    high: float  # 95th percentile
    repeats: int
    calls_per_repeat: int
    device: str

    @property
    def spread(self) -> float:
        """Width of the 5 to 95% range over the median: how far to trust the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def __str__(self) -> str:
        """
        >>> print(Timing(0.002, 0.0019, 0.0025, 20, 10, "cpu"))
        2 ms on cpu (1.9 ms to 2.5 ms in 20 repeats)
        """
        spread = f"{duration(self.low)} to {duration(self.high)} in {plural(self.repeats, 'repeat')}"
        return f"{duration(self.median)} on {self.device} ({spread})"


@dataclass(frozen=True)
class Epoch(Record):
    """One pass over the data."""

    number: int  # from 1
    loss: float  # mean over the items
    items: int
    seconds: float  # training alone, without the evaluation
    losses: dict[str, float]  # the named parts, where the objective gives several
    metrics: dict[str, float]  # from the evaluation, empty without one
    train_metrics: dict[str, float] = field(default_factory=dict)  # of the outputs that were trained on

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds if self.seconds else 0.0

    @property
    def scores(self) -> dict[str, float]:
        """All metrics, as they are called where there are both kinds: training accuracy, validation accuracy."""
        of_training = {f"training {name}": value for name, value in self.train_metrics.items()}
        return of_training | {f"validation {name}": value for name, value in self.metrics.items()}


def epoch_rows(epochs: Sequence[Epoch]) -> list[list[str]]:
    """The table of epochs, its header first."""
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.scores))
    rows = [["epoch", "loss", *names, "items/s", "time"]]
    for epoch in epochs:
        scores = (metric(name, epoch.scores.get(name)) for name in names)
        speed = count(epoch.items_per_second) if epoch.seconds > 0 else "unknown"
        rows.append([str(epoch.number), metric("loss", epoch.loss), *scores, speed, duration(epoch.seconds)])
    return rows


def epochs_table(epochs: Sequence[Epoch]) -> str:
    """The same as a notebook shows it."""
    header, *rows = epoch_rows(epochs)
    return markup.table(rows, header, words=())


@dataclass(frozen=True)
class GpuLoad(Record):
    """A GPU over a stretch of time, as it was sampled: all that ran on it, whoever started it."""

    index: int
    name: str
    uuid: str | None = None
    utilisation: float | None = None  # mean, percent
    utilisation_p95: float | None = None
    memory_peak: int | None = None  # bytes, the most that was in use at a sample
    memory_total: int | None = None
    power: float | None = None  # mean, watts
    joules: float | None = None
    energy_from: str | None = None  # counter: the GPU's own; power: its samples over the time
    temperature: float | None = None  # the highest, degrees Celsius
    throttled: float | None = None  # share of the samples, 0 to 1
    reasons: dict[str, float] = field(default_factory=dict)  # for throttling → share of the samples


@dataclass(frozen=True)
class Load(Record):
    """The hardware over a stretch of time."""

    seconds: float  # from the first sample to the last
    samples: int
    gpus: tuple[GpuLoad, ...] = ()
    cpu: float | None = None  # of the host, mean percent of all cores
    notes: tuple[str, ...] = ()  # what could not be read, and why

    @property
    def joules(self) -> float | None:
        """Energy of all the GPUs together; None where that of one is not known, or there is none."""
        each = [gpu.joules for gpu in self.gpus if gpu.joules is not None]
        return sum(each) if each and len(each) == len(self.gpus) else None

    def joules_per(self, items: float, per: int = 1000) -> float | None:
        """Energy for each `per` items of the `items` that were trained on meanwhile.

        >>> Load(60.0, 120, (GpuLoad(0, "H200", joules=36_000.0),)).joules_per(90_000)
        400.0
        """
        joules = self.joules
        return None if joules is None or items <= 0 else joules * per / items


@dataclass(frozen=True)
class PlanChange(Record):
    """The plan that a run carries out from one batch on."""

    step: int  # updates of the weights before it
    batch: int  # batches before it
    plan: dict[str, Any]  # as JSON: `Plan.from_json` makes it one again
    why: str


@dataclass(frozen=True)
class BestEpoch(Record):
    """The best epoch of a run, by one metric."""

    epoch: int  # its number, from 1
    metric: str
    value: float


@dataclass(frozen=True)
class RankPace(Record):
    """What an update took one of several ranks, in seconds: medians of those that were timed."""

    rank: int
    host: str
    device: str
    own: float | None = None  # until its gradients were sent: reading, computing, the update before; None: unknown
    waited: float | None = None  # for other ranks and for the exchange of gradients, after that


@dataclass(frozen=True)
class Report(Record):
    """What a run did, as it was measured."""

    device: str
    device_name: str
    reason: str  # why this device
    precision: str
    parameters: int
    versions: dict[str, str]
    started: str = ""  # ISO 8601, UTC
    seconds: float = 0.0
    steps: int = 0  # updates of the weights
    skipped: int = 0  # updates that the gradient scaler skipped
    interrupted: bool = False  # ended before it was done: by Ctrl-C, SIGTERM, the time limit or a hook
    epochs: tuple[Epoch, ...] = ()
    curve: tuple[tuple[int, float], ...] = ()  # (batch, loss), thinned
    peak_memory: int | None = None  # bytes on the device; None where the device does not tell
    levers: tuple[str, ...] = ()  # that the plan had pulled
    tuning: float = 0.0  # seconds of the run in which plans were tried
    out_of_memory: int = 0  # times that memory ran out and the batch was repeated in micro-batches
    micro_batch: int | None = None  # items computed at once at the end; None for whole batches
    stopped: str | None = None  # what ended it before all epochs were done: Ctrl-C, SIGTERM, the time limit
    resumed: int = 0  # times that it went on from a checkpoint
    saved: int | None = None  # the step of the last checkpoint
    saving: float = 0.0  # seconds for which checkpoints held training up
    load: Load | None = None  # what it asked of the hardware since it began, or last went on; None: nobody looked
    watched: int = 0  # items that were trained on meanwhile
    plans: tuple[PlanChange, ...] = ()  # that were carried out, the first one first
    ranks: int = 1  # processes that trained together; items, losses and metrics are those of all
    batch: int | None = None  # items of a step on all ranks together, where the loader tells
    best: BestEpoch | None = None  # by the metric that was asked for, else by the validation loss
    by_rank: tuple[RankPace, ...] = ()  # the ranks of the last part of the run
    parallel: str | None = None  # how `nn.DataParallel` trained, in words

    @property
    def items_per_second(self) -> float | None:
        """The median of the epochs; None where there is none."""
        rates = [epoch.items_per_second for epoch in self.epochs if epoch.seconds > 0]
        return median(rates) if rates else None

    @property
    def straggler(self) -> RankPace | None:
        """The rank for which the others wait: its own part of an update takes over 10% longer than their median."""
        timed = [(each.own, each) for each in self.by_rank if each.own is not None]
        if len(timed) < 2:
            return None
        most, slowest = max(timed, key=lambda pair: pair[0])
        others = median(own for own, each in timed if each is not slowest)
        return slowest if most > 1.1 * others else None

    def _ranks_words(self) -> list[str]:
        timed = [(each.own, each.waited) for each in self.by_rank if each.own is not None and each.waited is not None]
        if not timed:
            return []
        own, waited = zip(*timed, strict=True)
        told = f"an update took ranks {duration(min(own))} to {duration(max(own))} of their own"
        told += f", and {duration(min(waited))} to {duration(max(waited))} of waiting for one another"
        if (slow := self.straggler) is not None:
            told += f"; the others wait for rank {slow.rank} on {printable(slow.host)}"
        return [told]

    def __str__(self) -> str:
        """What a person asks of a run, in a few lines; the fields have the rest."""
        name = f" ({self.device_name})" if self.device_name and self.device_name != self.device else ""
        how = ", ".join([self.precision, *self.levers])
        done = f"{plural(len(self.epochs), 'epoch')} ({plural(self.steps, 'step')}) in {duration(self.seconds)}"
        together = f"{self.ranks} ranks, this one on " if self.ranks > 1 else ""
        lines = [f"{done} on {together}{self.device}{name}: {how}"]
        if self.epochs:
            first, last = self.epochs[0], self.epochs[-1]
            loss = f"{first.loss:.4g} → {last.loss:.4g}" if len(self.epochs) > 1 else f"{last.loss:.4g}"
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in last.metrics.items())
            lines.append(f"loss {loss}" + (f"; validation: {metrics}" if metrics else ""))
            if self.best is not None and self.best.epoch != last.number:
                lines.append(f"best {self.best.metric} {self.best.value:.4g} in epoch {self.best.epoch}")
        if (rate := self.items_per_second) is not None:
            memory = f", peak memory {size(self.peak_memory)}" if self.peak_memory is not None else ""
            lines.append(f"{count(rate)} items/s{memory}")
        lines += self._ranks_words()
        if self.parallel is not None:
            lines.append(self.parallel)
        if self.out_of_memory:
            lines.append(f"memory ran out {plural(self.out_of_memory, 'time')}, and the batch was repeated")
        if self.stopped is not None:
            lines.append(f"ended early: {self.stopped}")
        if self.saved is not None:
            lines.append(f"last checkpoint at step {self.saved:,}")
        return "\n".join(lines)

    __repr__ = __str__  # a prompt shows the last value, and the whole curve would fill pages

    @property
    def chief_metric(self) -> str | None:
        """The metric that stands for the run: accuracy where there is one, else the first that is not the loss."""
        scored = next((epoch.metrics for epoch in reversed(self.epochs) if epoch.metrics), {})
        names = [name for name in scored if name != "loss"]
        return "accuracy" if "accuracy" in names else next(iter(names), None)

    def picture(self) -> str:
        """How it learned, as HTML that inherits its colours: the loss, and the chief metric of the validation."""
        largest = max((epoch.items for epoch in self.epochs), default=0)
        # An epoch that was cut short holds fewer items, and so counts for less than one.
        length = sum(epoch.items for epoch in self.epochs) / largest if largest else 1.0
        scale = length / self.curve[-1][0] if self.curve and self.curve[-1][0] else 1.0

        def scores(name: str) -> list[tuple[float, float]]:
            return [(float(each.number), each.metrics[name]) for each in self.epochs if name in each.metrics]

        name = self.chief_metric
        curve = [(batch * scale, loss) for batch, loss in self.curve]
        return markup.learning(curve, len(self.epochs), scores("loss"), None if name is None else (name, scores(name)))

    def _repr_html_(self) -> str:
        """What a notebook shows: the same lines, the loss as a picture, and the epochs where they are asked for."""
        parts = [markup.lines(str(self))]
        if self.curve:
            parts.append(self.picture())
        if len(self.epochs) > 1:
            last = "the epochs" if len(self.epochs) <= MOST_ROWS else f"the last {MOST_ROWS} epochs"
            parts.append(markup.folded(last, epochs_table(self.epochs[-MOST_ROWS:])))
        return markup.box(*parts)
