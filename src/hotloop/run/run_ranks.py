"""`Alone`: what the processes of a run share, agree on and add up where there is one; `Together` is for several."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from hotloop.data.streams import Stream
from hotloop.device import Choice
from hotloop.errors import BadArgument
from hotloop.plan import Plan
from hotloop.ranks.group import Ranks, ranks_of
from hotloop.records import RankPace
from hotloop.step.data_parallel import SpreadModel, refuse_own_loss, spread_over_gpus
from hotloop.step.eager import OneProcess
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.step.training import TrainingStep

if TYPE_CHECKING:
    from hotloop.checkpoint.shards import Team
    from hotloop.ranks.heartbeat import RankLost

T = TypeVar("T")


class WholeData:
    """What a process that is alone reads of loaders: all of it."""

    def share(self, loader: T, *, fills: bool = True) -> T:
        """This rank's part of a loader; the same object for the same loader."""
        return loader

    def share_validation(self, loader: T, metrics: Mapping[str, Any] | None) -> tuple[T, Ranks | None]:
        """What this rank evaluates on, and the ranks whose evaluations are added up."""
        return loader, None

    def begin_epoch(self, stream: Stream[Any]) -> None:
        """Give all ranks the same rng state, so that samplers draw the same order."""

    def is_filler(self) -> bool:
        """Whether the batch of this step is filler, which counts for nothing."""
        return False


class Alone:
    """A process that trains by itself: what it has is what all have, and nothing is sent or waited for."""

    size = 1
    is_first = True  # whether this one prints, logs and saves
    may_repeat = True  # whether a pass that others do not make holds nobody up
    group: Ranks | None = None
    data = WholeData()
    _spread: SpreadModel | None = None  # by `nn.DataParallel`

    def spread(
        self, model: nn.Module, found: "nn.DataParallel[Any] | None", plan: Plan, optimizers: Any, goals: list[Any]
    ) -> tuple[nn.Module, Plan]:
        """The model as it trains, and the plan with it; `found` was around it, `goals` are loss and objectives."""
        if plan.parallel == "fsdp":
            raise BadArgument(
                "parallel='fsdp' in a process that is alone", fix="start several: `hotloop launch --gpus 2 script.py`"
            )
        if found is not None:
            plan = replace(plan, parallel="data_parallel")
        self._spread = spread_over_gpus(model, found, plan)
        refuse_own_loss(self._spread, has_loss=bool(goals))
        return model, plan

    @property
    def wrapper(self) -> nn.Module | None:
        """What is called in the model's place."""
        return None if self._spread is None else self._spread.wrapper

    def across(self, trained: TrainedObjective) -> OneProcess:
        """What the steps of an objective do together with those of other ranks."""
        return OneProcess()

    def team(self, model: nn.Module) -> "Team | None":
        """The ranks that write a checkpoint together."""
        return None

    def end_epoch(self, epoch: int, batches: int) -> None:
        """After an epoch of unknown length: raise where another rank has more batches of it."""

    # What ranks tell one another

    def begin(
        self,
        progress: Callable[[], list[int]],
        step: Callable[[], TrainingStep],
        weights: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Tell other ranks of this one from now on: its progress (see `Beat`), its pace, and what its weights are."""

    @property
    def telling(self) -> AbstractContextManager[None]:
        """Context of calls that wait for other ranks: an error caused by one of them becomes `RankLost`."""
        return nullcontext()

    def while_telling(self, batches: Iterator[T], items_in: Callable[[T], int]) -> Iterator[T]:
        """The same around an epoch in the person's own loop, at the end of which weights are compared."""
        return batches

    def lost(self, error: BaseException) -> "RankLost | None":
        """The reason where another rank caused an error; None for any other error."""
        return None

    def words(self, model: nn.Module, plan: Plan, batch: int | None) -> str | None:
        """A line on how ranks, or the GPUs of a process, train together; None for a single one."""
        return None if self._spread is None else self._spread.words(batch)

    @property
    def parallel(self) -> str | None:
        """How the GPUs of a process train together."""
        return None if self._spread is None else self._spread.words()

    # Decisions

    def after_step(self, stop: bool, save: bool, items: int) -> tuple[bool, bool]:
        """Whether to stop and to save between the next two windows; all ranks decide so after the same step."""
        return stop, save

    def saved(self) -> None:
        """Note that the agreed save is done."""

    def end(self) -> None:
        """Note the last step of a fit, on all ranks."""

    def largest(self, number: float) -> float:
        """The maximum over all ranks."""
        return number

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any rank; synchronizes all ranks, so between epochs only."""
        return self.largest(flag) > 0

    def from_first(self, value: T) -> T:
        """The value of rank 0, plain data."""
        return value

    def reason(self, words: str | None) -> str | None:
        """The first reason that a rank has; None where none has one."""
        return words

    def must_agree(self, what: dict[str, Any]) -> None:
        """Raise where ranks differ in these values."""

    # Sums

    def total(self, numbers: list[float]) -> list[float]:
        """The sums over all ranks."""
        return numbers

    def reduce_to_first(self, sums: Tensor) -> None:
        """Add the sums of all ranks to those of the first one, for its checkpoint; the others begin anew."""

    def means(self, means: dict[str, float], items: float) -> tuple[dict[str, float], int]:
        """Mean losses over the items of all ranks, and their number."""
        return means, int(items)

    def watch_of_all(self, watch: dict[str, Any]) -> dict[str, Any]:
        """The state of a `Watch` with the sums of all ranks in place of this one's."""
        return watch

    def random_of_all(self) -> list[Any]:
        """The rng states of all ranks as plain data, for a checkpoint; a single process saves none besides its own."""
        return []

    def by_rank(self, step: TrainingStep) -> tuple[RankPace, ...]:
        """The times of updates of each rank, gathered at the end of a run."""
        return ()


def ranks_and_device(want: str | torch.device | Choice | None) -> tuple[Alone, Choice]:
    """The ranks that this process trains with, and its device."""
    group, choice = ranks_of(want)
    if group is None:
        return Alone(), choice
    from hotloop.run.ranks_together import Together  # noqa: PLC0415  # only ranks load what they say to one another

    return Together(group), choice
