"""Hooks on steps and epochs of a run; the best epoch, early stopping, EMA."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hotloop.errors import BadArgument
from hotloop.printing.text import an, plural, printable, shorten
from hotloop.records import BestEpoch, Epoch

if TYPE_CHECKING:
    from hotloop.metrics.evaluation import Metrics
    from hotloop.run.loop import Loop

STOP = "stop"
Direction = Literal["min", "max"]
_LOWER = ("loss", "error", "perplexity", "ppl", "mae", "mse", "rmse", "wer", "cer", "nll", "fid")
_HIGHER = (
    "acc",
    "f1",
    "auc",
    "auroc",
    "precision",
    "recall",
    "iou",
    "dice",
    "bleu",
    "rouge",
    "psnr",
    "ssim",
    "r2",
    "map",
)


@dataclass(slots=True)
class StepRecord:
    """A finished step. Its values are still on the device; `float(record.loss)` synchronizes."""

    step: int  # updates of the weights so far
    epoch: int  # from 1
    batch: int  # of the epoch, from 1
    loss: Tensor  # detached, on the device
    loop: "Loop"
    dry_run: bool = False  # whether all of it is undone afterwards, but for what hooks keep somewhere else

    @property
    def model(self) -> nn.Module:
        return self.loop.model

    @property
    def lr(self) -> float:
        """The learning rate of the first group of the first optimizer."""
        return float(self.loop.optimizers[0].param_groups[0]["lr"])


@dataclass(slots=True)
class EpochRecord:
    """An epoch that was trained and evaluated."""

    epoch: Epoch  # its number, loss, items, seconds and metrics
    step: int
    loop: "Loop"
    dry_run: bool = False  # as in a `StepRecord`

    @property
    def model(self) -> nn.Module:
        return self.loop.model


OnStep = Callable[[StepRecord], object] | Sequence[Callable[[StepRecord], object]]
OnEpoch = Callable[[EpochRecord], object] | Sequence[Callable[[EpochRecord], object]]


def hooks_in(given: Any, name: str) -> tuple[Callable[[Any], object], ...]:
    """One hook or several, as a person gives them."""
    several = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in several:
        if not callable(each):
            raise BadArgument(
                f"{name}={an(type(each).__name__)} cannot be called", fix=f"give a function: {name}=lambda record: …"
            )
    return several


def asks_to_stop(hooks: Iterable[Callable[[Any], object]], record: Any, name: str) -> bool:
    """Call hooks; returns whether one of them asks to stop."""
    stops = False
    for hook in hooks:
        if (returned := hook(record)) is None:  # as most return
            continue
        if isinstance(returned, str) and returned == STOP:
            stops = True
        elif isinstance(returned, str):
            raise BadArgument(
                f"{name} returned {printable(returned)!r}", fix=f'return "{STOP}" to end the run, or nothing'
            )
    return stops


@dataclass(frozen=True)
class Goal:
    """The metric that decides which epoch is best, and its direction."""

    metric: str
    direction: Direction

    @classmethod
    def of(cls, best: Any, metrics: Iterable[str]) -> "Goal":
        """From a name, or a name and "min" or "max".

        >>> Goal.of("accuracy", ["accuracy"])
        Goal(metric='accuracy', direction='max')
        """
        name, direction = best if isinstance(best, tuple) and len(best) == 2 else (best, None)
        known = ["loss", *metrics]
        several = [n for n, m in metrics.items() if hasattr(m, "compute")] if isinstance(metrics, Mapping) else []
        is_part = isinstance(name, str) and name.startswith(tuple(f"{each}{mark}" for each in several for mark in "/["))
        if not isinstance(name, str) or (direction not in ("min", "max") and direction is not None):
            raise BadArgument(f"best={best!r}", fix='give the name of a metric, or ("name", "max")')
        if name not in known and not is_part:  # of several values, which are not known yet
            raise _unknown(name, known)
        words = set(name.lower().replace("-", "_").replace("/", "_").replace("@", "_").split("_"))
        if direction is None and any(word.startswith(_HIGHER) for word in words):
            direction = "max"
        elif direction is None and words & set(_LOWER):
            direction = "min"
        if direction is None:
            raise BadArgument(
                f"the name {name} does not say whether higher or lower is better",
                fix=f'best=("{name}", "max"), or "min"',
            )
        return cls(name, "max" if direction == "max" else "min")

    def __str__(self) -> str:
        return f"{self.direction} {self.metric}"

    def check(self, scores: Mapping[str, float]) -> None:
        """Raise where an evaluation has no such metric, because it gave several values under that name."""
        if self.metric not in scores and self.metric != "loss":  # which turns do not have
            raise _unknown(self.metric, scores)

    def score(self, epoch: Epoch) -> float:
        """The score of an epoch, lower is better; infinity where the metric is missing or NaN."""
        value = epoch.metrics.get(self.metric, math.nan)
        signed = value if self.direction == "min" else -value
        return math.inf if math.isnan(signed) else signed

    def words_for_patience(self, best: BestEpoch | None, last: Epoch, patience: int) -> str | None:
        """The message of a run that ends after `patience` epochs without progress."""
        if best is None or last.number - best.epoch < patience:
            return None
        return f"no better {self.metric} in {plural(patience, 'epoch')}"


def _unknown(name: str, known: Iterable[str]) -> BadArgument:
    return BadArgument(
        f"best={name!r}, and the evaluation gives {', '.join(known)}", fix="name one of them, or add it to metrics="
    )


@dataclass(frozen=True)
class RunHooks:
    """The hooks of a run, and the goal that decides its best epoch."""

    on_step: tuple[Callable[[Any], object], ...] = ()
    on_epoch: tuple[Callable[[Any], object], ...] = ()
    goal: Goal = Goal("loss", "min")
    patience: int | None = None  # epochs without a better one, after which the run ends
    restores_best: bool = False  # whether the model has the weights of the best epoch at the end

    @classmethod
    def of(
        cls,
        on_step: OnStep | None,
        on_epoch: OnEpoch | None,
        best: Any,
        patience: int | None,
        restore_best: bool,
        metrics: "Metrics | None",
        *,
        has_scores: bool,
    ) -> Self:
        """The hooks that `fit` was given, checked; `has_scores`: epochs are evaluated."""
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise BadArgument(f"patience={patience!r}", fix="give a number of epochs, from 1")
        for name, given in (("patience", patience), ("restore_best", restore_best), ("best", best != "loss")):
            if given and not has_scores:
                raise BadArgument(f"{name}= without validate=", fix="give the data: validate=val_loader")
        if metrics is not None:
            from hotloop.metrics.evaluation import check_metrics  # noqa: PLC0415  # with metrics alone

            check_metrics(metrics)
        goal = Goal.of(best, metrics or ())
        return cls(hooks_in(on_step, "on_step"), hooks_in(on_epoch, "on_epoch"), goal, patience, bool(restore_best))

    def handed(self) -> dict[str, object]:
        """Hook objects that may hold state, by name."""
        several = {"on_step": self.on_step, "on_epoch": self.on_epoch}
        return {
            name if len(hooks) == 1 else f"{name} {number}": hook
            for name, hooks in several.items()
            for number, hook in enumerate(hooks, 1)
        }


class Ema:
    """An exponential moving average of a model's weights, as a hook: `fit(…, on_step=ema)`.

    `ema.model` has the averaged weights, for evaluation, and averages of buffers such as running means; what is no
    average, whole numbers and buffers with infinities such as masks, it has as the model has it. Hand it over as
    `Loop(…, stateful={"ema": ema})` so that checkpoints hold it.

    >>> ema = Ema(nn.Linear(2, 1), decay=0.99)
    >>> sorted(ema.state_dict())[:2]
    ['module.bias', 'module.weight']
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise BadArgument(f"decay={decay}", fix="give a number between 0 and 1, such as 0.999")
        if lazy := [name for name, value in chain(model.named_parameters(), model.named_buffers()) if is_lazy(value)]:
            raise BadArgument(
                f"the first batch decides the shape of {shorten(lazy)}, of which there is no average yet",
                fix="call the model once before: model(x)",
            )
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self._copied = {number for number, buffer in enumerate(model.buffers()) if not _is_averaged(buffer)}
        self._step = 0  # of the last update that is in the average

    @property
    def model(self) -> nn.Module:
        """The model with the averaged weights."""
        return self.averaged.module

    def __call__(self, record: StepRecord) -> None:
        if record.step == self._step:  # a batch of an accumulation window that is not full yet
            return
        self._step = record.step
        first = next(self.averaged.parameters(), None)
        now = next(record.model.parameters(), None)
        if first is not None and now is not None and first.device != now.device:
            self.model.to(now.device)  # it was moved after this was made; PyTorch's counter stays, which it reads
        self.averaged.update_parameters(record.model)
        for number, (mine, current) in enumerate(zip(self.model.buffers(), record.model.buffers(), strict=True)):
            if number in self._copied:
                mine.detach().copy_(current.detach())

    def state_dict(self) -> dict[str, Any]:
        return self.averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averaged.load_state_dict(state)


def _is_averaged(buffer: Tensor) -> bool:
    """Whether a buffer can be averaged: not integers, which PyTorch truncates, nor infinities, which give NaN."""
    return (buffer.is_floating_point() or buffer.is_complex()) and bool(buffer.isfinite().all())
