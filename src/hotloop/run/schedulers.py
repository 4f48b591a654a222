"""`Schedule`: when learning rates change."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hotloop._torch import inner_schedulers
from hotloop.errors import BadArgument, PlanWarning
from hotloop.printing.text import an, plural
from hotloop.records import Epoch
from hotloop.run.warmup import WarmupCosine
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.values.snapshot import Snapshot

if TYPE_CHECKING:
    from hotloop.metrics.evaluation import Metrics
    from hotloop.run.kernel import TrainingRun

Every = Literal["step", "epoch"]
OneOrMore = LRScheduler | Sequence[LRScheduler]
Schedulers = OneOrMore | Mapping[Every, OneOrMore] | None


@dataclass(frozen=True)
class Schedule:
    """Advances learning-rate schedulers, except for skipped steps."""

    schedulers: tuple[LRScheduler, ...]
    rhythm: tuple[Every, ...]  # of each of them
    _waiting: dict[int, int] = field(default_factory=dict)  # schedulers that watch a metric: how far each was

    @classmethod
    def of(cls, scheduler: Schedulers, every: Every, optimizers: Sequence[Optimizer] = ()) -> "Schedule":
        """`optimizers` are those of the loop; raises for a scheduler of another optimizer."""
        if every not in ("step", "epoch"):
            raise BadArgument(f"schedule={every!r}", fix='choose "step" (after each update) or "epoch"')
        if isinstance(scheduler, Mapping) and every != "step":
            raise BadArgument(f"schedule={every!r} beside a dict of schedulers", fix="leave schedule= out")
        given: Mapping[Any, Any] = scheduler if isinstance(scheduler, Mapping) else {every: scheduler}
        if wrong := [name for name in given if name not in ("step", "epoch")]:
            raise BadArgument(
                f"scheduler= with schedulers for every {wrong[0]!r}",
                fix='a scheduler advances after each "step" or "epoch": scheduler={"step": …, "epoch": …}',
            )
        pairs = [(each, name) for name, some in given.items() for each in _several(some)]
        for each, _ in pairs:
            if not hasattr(each, "optimizer"):
                what = f"the class {each.__name__}" if isinstance(each, type) else an(type(each).__name__)
                raise BadArgument(
                    f"scheduler= with {what}",
                    fix="build one of torch.optim.lr_scheduler with the optimizer: StepLR(optimizer, step_size=30)",
                )
            if optimizers and all(each.optimizer is not optimizer for optimizer in optimizers):
                raise BadArgument(
                    f"the {type(each).__name__} is of another optimizer than the loop's",
                    fix="build it with the optimizer that you give to the Loop",
                )
        return cls(tuple(each for each, _ in pairs), tuple(name for _, name in pairs))

    @property
    def watches_a_metric(self) -> bool:
        return bool(self._watching)

    @property
    def _watching(self) -> list[ReduceLROnPlateau]:
        return [scheduler for scheduler in self.schedulers if isinstance(scheduler, ReduceLROnPlateau)]

    def check(self, metrics: "Metrics | None") -> None:
        """Before a run: raise for a scheduler whose metric is ambiguous."""
        if any(each.mode == "max" for each in self._watching) and len(metrics or {}) != 1:
            several = f"there are {len(metrics)} metrics: {', '.join(metrics)}" if metrics else "there is no metric"
            raise BadArgument(
                f'ReduceLROnPlateau(mode="max") needs a metric to maximize, and {several}',
                fix='give one: fit(…, validate=val_loader, metrics={"accuracy": accuracy});'
                ' mode="min" watches the loss',
            )

    def check_length(self, run: "TrainingRun") -> None:
        """Raise for a scheduler that ends before the run does.

        On several ranks, warn of one made for the batches of all of them.
        """
        if run.length is None:
            return
        accumulate, epochs, ranks = run.loop.plan.accumulate, run.epochs - run.epoch, run.core.ranks.size
        updates = epochs * math.ceil(run.length / accumulate)  # the last of an epoch may be cut short
        updates -= run.batches // accumulate
        rarity = {id(o): each.every for each in run.loop.objectives for o in each.optimizers}
        for each, rhythm in zip(self.schedulers, self.rhythm, strict=True):
            if not isinstance(each, OneCycleLR | WarmupCosine):
                continue
            left, unit = (updates // rarity[id(each.optimizer)], "update") if rhythm == "step" else (epochs, "epoch")
            name, argument = type(each).__name__, "total_steps" if isinstance(each, OneCycleLR) else "steps"
            if each.last_epoch + left > each.total_steps:
                raise BadArgument(
                    f"the {name} ends after {plural(each.total_steps, 'step')}, has made {each.last_epoch}, and the"
                    f" run has {plural(left, unit)} left",
                    fix=f"build it for the whole run: {name}(…, {argument}={each.last_epoch + left})",
                )
            if ranks > 1 and each.total_steps > ranks * (each.last_epoch + left - 1):
                warnings.warn(
                    f"the {name} was made for {each.total_steps} steps, and each of {ranks} ranks makes"
                    f" {each.last_epoch + left}: its rate is still high at the end. fix: divide by"
                    " hotloop.world_size(), since len(loader) counts the batches of all ranks",
                    PlanWarning,
                    stacklevel=3,
                )

    def advance(self) -> None:
        """Step the schedulers after an update of every objective."""
        for scheduler in self._counting("step"):
            scheduler.step()

    def snapshot(self) -> Snapshot:
        """A snapshot of the schedulers and the optimizer settings that they change."""
        held = [vars(holder) for each in self.schedulers for holder in parts_of_scheduler(each)]
        return Snapshot().items([*held, *(group for each in self.schedulers for group in each.optimizer.param_groups)])

    def after_update(self, trained: TrainedObjective) -> None:
        if not self.schedulers:
            return
        for scheduler in self._counting("step"):
            if scheduler.optimizer in trained.optimizers:
                scheduler.step()

    def after_epoch(self) -> None:
        for scheduler in self._counting("epoch"):
            scheduler.step()
        for number, watching in enumerate(self._watching):
            if self._waiting.get(number) == watching.last_epoch:
                warnings.warn(
                    "ReduceLROnPlateau was not stepped between two epochs, so the learning rate stays as it is: outside"
                    " fit, your loop steps it\n  fix: after each epoch,"
                    ' scheduler.step(loop.evaluate(val_loader)["loss"])',
                    PlanWarning,
                    stacklevel=3,
                )
            self._waiting[number] = watching.last_epoch

    def after_evaluation(self, epoch: Epoch, metrics: "Metrics | None") -> None:
        """Step schedulers that watch a metric: the validation loss, the training loss without one, or with
        `mode="max"` the only metric."""
        for scheduler in self._watching:
            if scheduler.mode == "max":
                scheduler.step(_only(epoch, metrics))
            else:
                scheduler.step(epoch.metrics.get("loss", epoch.loss))

    def _counting(self, every: Every) -> list[LRScheduler]:
        """The schedulers stepped by these; not those that watch a metric."""
        pairs = zip(self.schedulers, self.rhythm, strict=True)
        return [s for s, rhythm in pairs if rhythm == every and not isinstance(s, ReduceLROnPlateau)]


def _several(scheduler: Any) -> Sequence[Any]:
    if scheduler is None:
        return ()
    return tuple(scheduler) if isinstance(scheduler, Iterable) else (scheduler,)


def parts_of_scheduler(scheduler: Any) -> Iterator[Any]:
    """A scheduler and the other holders of its state: inner schedulers, functions with attributes."""
    yield scheduler
    for inner in inner_schedulers(scheduler):
        yield from parts_of_scheduler(inner)
    yield from (each for each in getattr(scheduler, "lr_lambdas", ()) if hasattr(each, "__dict__"))


def functions_in(scheduler: Any) -> Iterator[Any]:
    """The person's functions in a scheduler, whose `state_dict` leaves out what they keep."""
    for part in parts_of_scheduler(scheduler):
        held = vars(part).values() if isinstance(part, LRScheduler) else ()
        several = chain.from_iterable(value if isinstance(value, list) else [value] for value in held)
        yield from (each for each in several if isinstance(each, FunctionType | MethodType | partial))


def _only(epoch: Epoch, metrics: "Metrics | None") -> float:
    """The value of the only metric of a run."""
    (name,) = metrics or ("",)
    if name not in epoch.metrics:
        found = ", ".join(key for key in epoch.metrics if key != "loss")
        raise BadArgument(
            f"ReduceLROnPlateau cannot watch the metric {name!r}, which gives several numbers: {found}",
            fix="give it a metric of one number",
        )
    return epoch.metrics[name]
