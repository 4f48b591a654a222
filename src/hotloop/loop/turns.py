"""`Turn`: one objective and the optimizers that follow it; `Schedule`: when their learning rates change."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hotloop.errors import BadArgument
from hotloop.objective import Objective

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
    if isinstance(objective, Mapping):
        if not isinstance(optimizer, Mapping) or set(optimizer) != set(objective):
            named = sorted(optimizer) if isinstance(optimizer, Mapping) else type(optimizer).__name__
            raise BadArgument(
                f"objectives {sorted(objective)} do not pair with optimizers {named}",
                fix="give both as dicts with the same names; the turns are taken in the order of the objectives",
            )
        return tuple(Turn(name, objective[name], (optimizer[name],)) for name in objective)
    every = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    optimizers = tuple(every) if isinstance(every, Iterable) else (every,)
    wrong = [o for o in optimizers if not isinstance(o, Optimizer)]
    if wrong or not optimizers:
        raise BadArgument(
            f"the optimizer is a {type(wrong[0]).__name__}" if wrong else "no optimizer was given",
            fix="give one of torch.optim, built from model.parameters(); or a list or dict of them",
        )
    return (Turn("loss", objective, optimizers),)


@dataclass(frozen=True)
class Schedule:
    """Advances learning-rate schedulers: never for a step that was skipped."""

    schedulers: tuple[LRScheduler, ...]
    every: Every

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
        return any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self.schedulers)

    def after_update(self, turn: Turn) -> None:
        if not self.schedulers:
            return
        for scheduler in self._counting("step"):
            if scheduler.optimizer in turn.optimizers:
                scheduler.step()

    def after_epoch(self) -> None:
        for scheduler in self._counting("epoch"):
            scheduler.step()

    def after_evaluation(self, value: float) -> None:
        """For schedulers that watch a metric: the validation loss, or the training loss without one."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(value)

    def _counting(self, every: Every) -> list[LRScheduler]:
        """The schedulers that count these; one that watches a metric counts nothing."""
        return [s for s in self.schedulers if every == self.every and not isinstance(s, ReduceLROnPlateau)]
