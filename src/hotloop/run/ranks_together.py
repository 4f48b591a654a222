"""`Together`: what the ranks of a run share, agree on and add up."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import DistStoreError

from hotloop.checkpoint.codec import pack
from hotloop.data.samplers import generators_of, is_even, is_filler, shared
from hotloop.data.streams import Stream
from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument, PlanWarning
from hotloop.objective.weighing import norms_in
from hotloop.plan import Plan
from hotloop.printing.text import plural, shorten
from hotloop.ranks.group import Agreement, Ranks, timeout
from hotloop.ranks.heartbeat import Heartbeat, RankLost, several
from hotloop.records import RankPace
from hotloop.run.alike import checksum, facts_of_run, how_apart
from hotloop.run.rank_file import RankFile
from hotloop.run.run_ranks import Alone, WholeData
from hotloop.step.across import AcrossRanks, Replicas, Shards
from hotloop.step.sharding import across_ranks, is_sharded, team_of
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.step.training import TrainingStep
from hotloop.values.rng import RngStates

if TYPE_CHECKING:
    from hotloop.checkpoint.shards import Team

T = TypeVar("T")
POLL = 0.02  # seconds
SAME = (
    "give every rank as many batches, or a loader with a length; without `is_sharded`, hotloop deals out the batches of"
    " one loader so that no rank has more than another"
)
_epochs = count()  # of unknown length, of all loops of this process


class DealtData(WholeData):
    """This rank's parts of loaders."""

    def __init__(self, group: Ranks, model: nn.Module) -> None:
        self._group, self._model = group, model
        self._stream: Stream[Any] | None = None
        self._dealt: dict[tuple[int, bool], tuple[Any, Any]] = {}  # loaders, and what this rank reads of them

    def share(self, loader: Any, *, fills: bool = True) -> Any:
        if loader is None or isinstance(loader, Stream):
            return loader
        key = (id(loader), fills)
        if key not in self._dealt:
            self._dealt[key] = (loader, shared(loader, self._group, fills=fills))
        return self._dealt[key][1]

    def share_validation(self, loader: Any, metrics: Mapping[str, Any] | None) -> tuple[Any, Ranks | None]:
        if any(hasattr(m, "compute") and not hasattr(m, "sync_on_compute") for m in (metrics or {}).values()):
            return loader, None  # a metric has a state that cannot be added up
        # With FSDP all ranks make equally many passes.
        return self.share(loader, fills=is_sharded(self._model)), self._group

    def begin_epoch(self, stream: Stream[Any]) -> None:
        self._stream = stream
        self._group.share_rng_state([torch.default_generator, *generators_of(stream.loader)])

    def is_filler(self) -> bool:
        return self._stream is not None and is_filler(self._stream.loader, self._stream.origin)

    def is_even(self) -> bool:
        """Whether all ranks surely have batches of one size in this step."""
        return self._stream is not None and is_even(self._stream.loader, self._stream.origin)


class Together(Alone):
    """The ranks of a run, which train one model on their parts of each batch."""

    may_repeat = False
    data: DealtData
    _model: nn.Module
    _heartbeat: Heartbeat

    def __init__(self, group: Ranks) -> None:
        self.group: Ranks = group
        self.size, self.is_first = group.size, group.is_first
        self._items = 0  # that this rank has trained on
        self._agreement = Agreement(group)
        self._is_told_apart = False  # whether it was said that weights differ by rounding
        self._weights: Callable[[], Mapping[str, Tensor]] = dict  # that all ranks have the same of

    def spread(
        self, model: nn.Module, found: "nn.DataParallel[Any] | None", plan: Plan, optimizers: Any, goals: list[Any]
    ) -> tuple[nn.Module, Plan]:
        if plan.parallel == "data_parallel":
            raise BadArgument(
                f"parallel='data_parallel' on {self.size} ranks, each of which has a GPU of its own",
                fix="leave it out: DDP is used there",
            )
        common = replace(plan, device=self.group.device.type)
        self.group.must_agree(facts_of_run(model, common, optimizers, goals))
        self._model = across_ranks(model, optimizers, self.group, plan)
        self.data = DealtData(self.group, self._model)
        return self._model, plan

    def across(self, trained: TrainedObjective) -> AcrossRanks:
        kind = Shards if is_sharded(self._model) else Replicas
        return kind(self.group, self._model, trained, is_even=self.data.is_even, is_filler=self.data.is_filler)

    def team(self, model: nn.Module) -> "Team | None":
        return team_of(model, self.group)

    def end_epoch(self, epoch: int, batches: int) -> None:
        # The next collective of a rank with more would meet another one of this rank, which ends processes, or adds up
        # what does not belong together.
        if (store := self._heartbeat.store) is None:
            return
        number, end = next(_epochs), time.monotonic() + timeout().total_seconds()
        keys = [f"hotloop/batches of rank {rank} in epoch {number}" for rank in range(self.size)]
        mine = f"{self.group} had {plural(batches, 'batch', 'batches')} in epoch {epoch}"
        store.set(keys[self.group.rank], str(batches))
        while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            time.sleep(POLL)
            self._heartbeat.hear(missing)
            beats = [self._heartbeat.known[rank] for rank in missing if rank in self._heartbeat.known]
            if more := [f"{beat.name} is in {beat}" for beat in beats if beat.progress[1:] > [epoch, batches]]:
                raise RankLost(f"ranks have different numbers of batches: {mine}, but {several(more)}", fix=SAME)
            if time.monotonic() > end or any(beat.ended or beat.end_of_process() for beat in beats):
                raise DistStoreError(f"{plural(len(missing), 'rank')} did not come to the end of epoch {epoch}")
        if len(set(lengths := [int(each) for each in store.multi_get(keys)])) > 1:
            each = several([f"rank {rank} had {length}" for rank, length in enumerate(lengths)])
            raise RankLost(f"ranks have different numbers of batches in epoch {epoch}: {each}", fix=SAME)

    # What ranks tell one another

    def begin(
        self,
        progress: Callable[[], list[int]],
        step: Callable[[], TrainingStep],
        weights: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._weights = weights
        show = RankFile(self.group, lambda: self._items, lambda: _pace(step())).write
        self._heartbeat = Heartbeat(self.group, progress, show)

    @property
    def telling(self) -> AbstractContextManager[None]:
        return self._heartbeat

    def while_telling(self, batches: Iterator[T], items_in: Callable[[T], int]) -> Iterator[T]:
        with self.telling:
            for batch in batches:
                yield batch
                self._items += items_in(batch)
            self._compared([])

    def lost(self, error: BaseException) -> RankLost | None:
        return self._heartbeat.lost(error)

    def words(self, model: nn.Module, plan: Plan, batch: int | None) -> str:
        kind = "FSDP" if plan.parallel == "fsdp" else "DDP"
        items = "" if batch is None else f": {batch // self.size} items each, {batch} in a step"
        line = f"{plural(self.size, 'rank')} ({kind}){items}; the learning rate is not scaled"
        names = [] if plan.sync_batchnorm else norms_in(model)
        if names:
            line += f"; batch normalisation ({shorten(names, 2)}) uses only the items of its rank"
            if backend_of(self.group.device).has_sync_batchnorm:
                line += ": Loop(…, sync_batchnorm=True) uses all"
        return line

    # Decisions

    def after_step(self, stop: bool, save: bool, items: int) -> tuple[bool, bool]:
        self._items += items
        return self._agreement.after_step(stop, save)

    def saved(self) -> None:
        self._agreement.saved()

    def end(self) -> None:
        self._agreement.end()

    def largest(self, number: float) -> float:
        return self.group.largest([number])[0]

    def from_first(self, value: Any) -> Any:
        return self.group.gather(value)[0]

    def reason(self, words: str | None) -> str | None:
        return next((each for each in self.group.gather(words) if each is not None), None)

    def must_agree(self, what: dict[str, Any]) -> None:
        with self.telling:
            self.group.must_agree(what)
            self._heartbeat.hear()  # all have said a word before

    # Sums

    def total(self, numbers: list[float]) -> list[float]:
        return self.group.total(numbers)

    def reduce_to_first(self, sums: Tensor) -> None:
        total = torch.tensor(self.group.total(sums.flatten().tolist()), dtype=sums.dtype)
        sums.copy_(total.view_as(sums) * self.is_first)

    def means(self, means: dict[str, float], items: float) -> tuple[dict[str, float], int]:
        *sums, count = self._compared([*(items * value if items else 0.0 for value in means.values()), items])
        return {name: total / max(count, 1.0) for name, total in zip(means, sums, strict=True)}, int(count)

    def watch_of_all(self, watch: dict[str, Any]) -> dict[str, Any]:
        sums = None if watch["sums"] is None else watch["sums"].tolist()
        items, *rest = self._compared([float(watch["items"]), *watch["totals"], *(sums or [])])
        totals = rest[: len(watch["totals"])]
        added = None if sums is None else torch.tensor(rest[len(totals) :], dtype=watch["sums"].dtype)
        return {**watch, "items": int(items), "totals": totals, "sums": added}

    def _compared(self, numbers: list[float]) -> list[float]:
        """The sums over all ranks; the same collective tells whether these have the same weights still."""
        weights = self._weights()
        each = [0.0] * self.size
        each[self.group.rank] = checksum(weights.values())
        told = self.group.total([*numbers, *each])
        words = how_apart(self.group, weights, told[len(numbers) :])
        if words is not None and not self._is_told_apart:
            self._is_told_apart = True
            warnings.warn(words, PlanWarning, stacklevel=4)
        return told[: len(numbers)]

    def random_of_all(self) -> list[Any]:
        tensors, data = pack(RngStates(self.group.device).state_dict())
        plain = {name: [str(t.dtype).removeprefix("torch."), t.tolist()] for name, t in tensors.items()}
        return self.group.gather([plain, data])

    def by_rank(self, step: TrainingStep) -> tuple[RankPace, ...]:
        own, waited = _pace(step) or (None, None)
        mine = RankPace(self.group.rank, self.group.host, str(self.group.device), own, waited)
        return tuple(RankPace.from_json(each) for each in self.group.gather(mine.to_json()))


def _pace(step: TrainingStep) -> tuple[float, float] | None:
    """Seconds of an update: own work, and waiting for others; None where none was timed."""
    paces = [pace for eager in step.eagers if (pace := eager.across.pace) is not None]
    times = [each for pace in paces if (each := pace.medians()) is not None]
    return (sum(own for own, _ in times), sum(waited for _, waited in times)) if times else None
