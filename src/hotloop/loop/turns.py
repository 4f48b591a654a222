"""`Turn`: one objective and the optimizers that follow it; `Schedule`: when their learning rates change."""

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hotloop.errors import BadArgument, PlanWarning
from hotloop.evaluation import Metrics
from hotloop.objective import Objective
from hotloop.records import Epoch
from hotloop.text import an, plural

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
Schedulers = LRScheduler | Sequence[LRScheduler] | None
Every = Literal["step", "epoch"]
_ZERO_GRAD = Optimizer.zero_grad


@dataclass(frozen=True)
class Turn:
    """One objective and the optimizers that follow it; most loops have one turn, a GAN has two."""

    name: str
    objective: Objective
    optimizers: tuple[Optimizer, ...]

    @property
    def parameters(self) -> list[nn.Parameter]:
        every = (p for o in self.optimizers for group in o.param_groups for p in group["params"])
        return list(dict.fromkeys(every))  # two optimizers may share one

    def clear(self) -> None:
        """Let the gradients go, as `zero_grad` does, which takes the host longer than several kernels would."""
        for optimizer in self.optimizers:
            if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer):  # it has its own
                optimizer.zero_grad()
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


def turns_of(optimizer: Optimizers, objective: Objective | Mapping[str, Objective]) -> tuple[Turn, ...]:
    """Pair objectives with optimizers: by name where there are several objectives, else all follow the one."""
    every = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    optimizers = tuple(every) if isinstance(every, Iterable) else (every,)
    _check(optimizers)
    if not isinstance(objective, Mapping):
        return (Turn("loss", objective, optimizers),)
    if not isinstance(optimizer, Mapping) or set(optimizer) != set(objective):
        named = sorted(optimizer) if isinstance(optimizer, Mapping) else type(optimizer).__name__
        raise BadArgument(
            f"objectives {sorted(objective)} do not pair with optimizers {named}",
            fix="give both as dicts with the same names; the turns are taken in the order of the objectives",
        )
    return tuple(Turn(name, objective[name], (optimizer[name],)) for name in objective)


def _check(optimizers: tuple[Optimizer, ...]) -> None:
    """Refuse what is no optimizer, and one that computes the loss itself, several times in a step."""
    wrong = [o for o in optimizers if not isinstance(o, Optimizer)]
    if wrong or not optimizers:
        raise BadArgument(
            f"the optimizer is {an(type(wrong[0]).__name__)}" if wrong else "no optimizer was given",
            fix="give one of torch.optim, built from model.parameters(); or a list or dict of them",
        )
    for each in optimizers:
        if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in _arguments_of_step(each)):
            raise BadArgument(
                f"{type(each).__name__}.step needs a closure that computes the loss again, and the Loop gives none",
                fix="use an optimizer whose step() takes no closure, such as torch.optim.AdamW;"
                f" {type(each).__name__} works in a loop of your own",
            )


def _arguments_of_step(optimizer: Optimizer) -> list[inspect.Parameter]:
    try:  # of the class: a scheduler wraps the step of the object
        return list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except (TypeError, ValueError):  # one that is not written in Python
        return []


@dataclass(frozen=True)
class Schedule:
    """Advances learning-rate schedulers: never for a step that was skipped."""

    schedulers: tuple[LRScheduler, ...]
    every: Every
    _waiting: dict[int, int] = field(default_factory=dict)  # schedulers that watch a metric: how far each was

    @classmethod
    def of(cls, scheduler: Schedulers, every: Every, optimizers: Sequence[Optimizer] = ()) -> "Schedule":
        """`optimizers` are those of the loop: a scheduler of another one would change nothing here."""
        if every not in ("step", "epoch"):
            raise BadArgument(f"schedule={every!r}", fix='choose "step" (after each update) or "epoch"')
        schedulers = (
            () if scheduler is None else (scheduler,) if isinstance(scheduler, LRScheduler) else tuple(scheduler)
        )
        for each in schedulers:
            if optimizers and all(each.optimizer is not optimizer for optimizer in optimizers):
                raise BadArgument(
                    f"the {type(each).__name__} is of another optimizer than the loop's",
                    fix="build it with the optimizer that you give to the Loop",
                )
        return cls(schedulers, every)

    @property
    def watches_a_metric(self) -> bool:
        return bool(self._watching)

    @property
    def _watching(self) -> list[ReduceLROnPlateau]:
        return [scheduler for scheduler in self.schedulers if isinstance(scheduler, ReduceLROnPlateau)]

    def check(self, metrics: Metrics | None) -> None:
        """Before a run: refuse a scheduler for which it is not clear what it watches."""
        if any(each.mode == "max" for each in self._watching) and len(metrics or {}) != 1:
            several = f"there are {len(metrics)} metrics: {', '.join(metrics)}" if metrics else "there is no metric"
            raise BadArgument(
                f'ReduceLROnPlateau(mode="max") waits for something that should grow, and {several}',
                fix='give the one that it shall watch: fit(…, validate=val_loader, metrics={"accuracy": accuracy});'
                ' mode="min" watches the loss',
            )

    def check_length(self, updates: int, epochs: int) -> None:
        """Refuse a scheduler that ends before the `updates` and `epochs` that are left of a run."""
        steps, unit = (updates, "update") if self.every == "step" else (epochs, "epoch")
        for each in self.schedulers:
            if isinstance(each, OneCycleLR) and each.last_epoch + steps > each.total_steps:
                raise BadArgument(
                    f"the OneCycleLR ends after {plural(each.total_steps, 'step')}, has made {each.last_epoch}, and the"
                    f" run has {plural(steps, unit)} left",
                    fix=f"build it for the whole run: OneCycleLR(…, total_steps={each.last_epoch + steps})",
                )

    def after_update(self, turn: Turn) -> None:
        if not self.schedulers:
            return
        for scheduler in self._counting("step"):
            if scheduler.optimizer in turn.optimizers:
                scheduler.step()

    def after_epoch(self) -> None:
        for scheduler in self._counting("epoch"):
            scheduler.step()
        for number, watching in enumerate(self._watching):
            if self._waiting.get(number) == watching.last_epoch:
                warnings.warn(
                    "ReduceLROnPlateau was not stepped between two epochs, so the learning rate stays as it is: outside"
                    " fit nobody tells it what to watch\n  fix: after each epoch,"
                    ' scheduler.step(loop.evaluate(val_loader)["loss"])',
                    PlanWarning,
                    stacklevel=4,
                )
            self._waiting[number] = watching.last_epoch

    def after_evaluation(self, epoch: Epoch, metrics: Metrics | None) -> None:
        """For schedulers that watch a metric: the validation loss, the training loss without one, or with
        `mode="max"` the one metric that there is."""
        for scheduler in self._watching:
            if scheduler.mode == "max":
                scheduler.step(_only(epoch, metrics))
            else:
                scheduler.step(epoch.metrics.get("loss", epoch.loss))

    def _counting(self, every: Every) -> list[LRScheduler]:
        """The schedulers that count these; one that watches a metric counts nothing."""
        return [s for s in self.schedulers if every == self.every and not isinstance(s, ReduceLROnPlateau)]


def _only(epoch: Epoch, metrics: Metrics | None) -> float:
    """The value of the only metric of a run."""
    (name,) = metrics or ("",)
    if name not in epoch.metrics:
        found = ", ".join(key for key in epoch.metrics if key != "loss")
        raise BadArgument(
            f"ReduceLROnPlateau cannot watch the metric {name!r}, which gives several numbers: {found}",
            fix="give it a metric of one number",
        )
    return epoch.metrics[name]
