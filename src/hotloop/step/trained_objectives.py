"""`TrainedObjective`: one objective and the optimizers that follow it."""

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from hotloop.errors import BadArgument, PlanWarning
from hotloop.objective.objectives import Objective
from hotloop.printing.text import an, plural, shorten

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
_ZERO_GRAD = Optimizer.zero_grad


@dataclass(frozen=True)
class TrainedObjective:
    """One objective and the optimizers that follow it; most loops have one, a GAN has two that alternate."""

    name: str
    objective: Objective
    optimizers: tuple[Optimizer, ...]
    modules: tuple[nn.Module, ...] = ()  # whose parameters get gradients though no optimizer is known
    every: int = 1  # accumulation windows, of which the first trains it

    @property
    def parameters(self) -> list[nn.Parameter]:
        every: dict[nn.Parameter, None] = {}  # two optimizers may share one
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                every |= dict.fromkeys(group["params"])
        for module in self.modules:
            every |= dict.fromkeys(module.parameters())
        return list(every)

    def zero_grad(self) -> None:
        """Set `.grad = None` directly: `Optimizer.zero_grad` takes the host longer than several kernels would."""
        for optimizer in self.optimizers:
            if getattr(optimizer.zero_grad, "__func__", None) is not _ZERO_GRAD:  # it has its own
                optimizer.zero_grad()
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        for module in self.modules:
            for parameter in module.parameters():
                parameter.grad = None


def objectives_of(
    optimizer: Optimizers, objective: Objective | Mapping[str, Objective], every: Mapping[str, int] | None = None
) -> tuple[TrainedObjective, ...]:
    """Pair objectives with optimizers: by name for several objectives, else all optimizers with the one.

    `every`: the interval, in batches, of objectives that are not trained on each.
    """
    given = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    optimizers = tuple(given) if isinstance(given, Iterable) else (given,)
    _check(optimizers)
    _check_every(every, objective if isinstance(objective, Mapping) else {})
    if not isinstance(objective, Mapping):
        return (TrainedObjective("loss", objective, optimizers),)
    if not isinstance(optimizer, Mapping) or set(optimizer) != set(objective):
        named = sorted(optimizer) if isinstance(optimizer, Mapping) else type(optimizer).__name__
        raise BadArgument(
            f"objectives {sorted(objective)} do not pair with optimizers {named}",
            fix="give both as dicts with the same names; they alternate in the order of the objectives",
        )
    return tuple(
        TrainedObjective(name, each, (optimizer[name],), every=(every or {}).get(name, 1))
        for name, each in objective.items()
    )


def _check_every(every: Mapping[str, int] | None, objectives: Mapping[str, object]) -> None:
    """Raise where a name is unknown, a value is no count, or nothing is trained on some batches."""
    if every is None:
        return
    fix = 'name objectives that wait for others: train_every={"generator": 5}, once in five batches'
    if not isinstance(every, Mapping) or not every.keys() <= objectives.keys():
        named = ", ".join(map(str, objectives)) or "none by name"
        raise BadArgument(f"train_every={every!r}, and the objectives are {named}", fix=fix)
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in every.values()):
        raise BadArgument(f"train_every={dict(every)!r}", fix="give whole numbers of batches, from 1")
    if all(every.get(name, 1) > 1 for name in objectives):
        raise BadArgument(
            f"train_every={dict(every)!r} leaves batches on which nothing is trained",
            fix="leave out at least one objective, which is trained on every batch",
        )


def _kind(given: object) -> str:
    """The kind of a value in words: a Linear, the class SGD."""
    return f"the class {given.__name__}" if isinstance(given, type) else an(type(given).__name__)


def _check(optimizers: tuple[Optimizer, ...]) -> None:
    """Raise for what is no optimizer, and for one that computes the loss itself beside others."""
    wrong = [o for o in optimizers if not isinstance(o, Optimizer)]
    if wrong or not optimizers:
        raise BadArgument(
            f"the optimizer is {_kind(wrong[0])}" if wrong else "no optimizer was given",
            fix="give one of torch.optim, built from model.parameters(); or a list or dict of them",
        )
    for each in optimizers:
        if "param_groups" not in vars(each):  # `Optimizer.__init__` has not run, and what it makes is missing
            inside = isinstance(getattr(each, "optimizer", None), Optimizer)
            raise BadArgument(
                f"the optimizer is {_kind(each)}, which stands for another one",
                fix=f"give the one that it wraps{', as `optimizer.optimizer`' if inside else ''}",
            )
    if len(optimizers) > 1 and (closures := [each for each in optimizers if needs_closure(each)]):
        raise BadArgument(
            f"{type(closures[0]).__name__}.step needs a closure that computes the loss again, which goes with no other"
            " optimizer",
            fix="give it all parameters of its objective, or use optimizers whose step() takes no closure",
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer computes the loss itself, several times in a step, as LBFGS does."""
    try:  # of the class: a scheduler wraps the step of the object
        _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError):  # one that is not written in Python
        return False
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in arguments)


def tell_of_weights_without_optimizer(model: nn.Module, trained: TrainedObjective) -> None:
    """Warn of weights that have a gradient and no optimizer, after an update."""
    held = set(map(id, trained.parameters))
    left = [
        name for name, parameter in model.named_parameters() if parameter.grad is not None and id(parameter) not in held
    ]
    if left:
        warnings.warn(
            f"no optimizer of the loop holds {plural(len(left), 'parameter')} that get a gradient and do not change:"
            f" {shorten(left, 3)}\n  fix: build the optimizer from model.parameters(), or call requires_grad_(False) on"
            " what is not to be trained, which also saves its gradient",
            PlanWarning,
            stacklevel=2,
        )
