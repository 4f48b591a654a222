"""`Collective`: collective decisions and sums of the ranks of a run; for a single process, its own values."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistStoreError

from hotloop.checkpoint.tree import pack
from hotloop.data.samplers import generators_of
from hotloop.data.sharing import is_even, is_filler, shared
from hotloop.data.streams import Stream
from hotloop.errors import PlanWarning
from hotloop.objective.weighing import norms_in
from hotloop.plan import Plan
from hotloop.printing.text import plural, shorten
from hotloop.ranks.group import Agreement, Ranks, timeout
from hotloop.ranks.heartbeat import Heartbeat, RankLost, several
from hotloop.records import RankPace
from hotloop.step.data_parallel import SpreadModel
from hotloop.step.training import TrainingStep
from hotloop.training.alike import checksum, how_apart
from hotloop.training.rank_file import RankFile
from hotloop.values.rng import RngStates

POLL = 0.02  # seconds
SAME = (
    "give every rank as many batches, or a loader with a length; without `is_sharded`, hotloop deals out the batches of"
    " one loader so that no rank has more than another"
)
_epochs = count()  # of unknown length, of all loops of this process


class Collective:
    """The ranks of a run; None for a single process, whose model `spread` may put on several GPUs."""

    def __init__(self, ranks: Ranks | None, spread: SpreadModel | None = None) -> None:
        self.ranks, self.spread = ranks, spread
        self.wrapper = None if spread is None else spread.wrapper
        self.size = 1 if ranks is None else ranks.size
        self.is_first = ranks is None or ranks.is_first
        self._dealt: dict[tuple[int, bool], tuple[Any, Any]] = {}  # loaders, and what this rank reads of them
        self._heartbeat = None if ranks is None else Heartbeat(ranks)
        self._items = 0  # that this rank has trained on
        self._agreement = None if ranks is None else Agreement(ranks)
        self._calls = 0
        self._since = time.perf_counter()
        self._agreed = (False, False)  # what is to be done between two windows: stop, save
        self._is_told_apart = False  # whether it was said that weights differ by rounding
        self._weights: Callable[[], Mapping[str, Tensor]] = dict  # that all ranks have the same of

    # Data

    def share(self, loader: Any, *, fills: bool = True) -> Any:
        """This rank's part of a loader; the same object for the same loader."""
        if self.ranks is None or loader is None or isinstance(loader, Stream):
            return loader
        key = (id(loader), fills)
        if key not in self._dealt:
            self._dealt[key] = (loader, shared(loader, self.ranks, fills=fills))
        return self._dealt[key][1]

    def share_validation(self, loader: Any, metrics: Mapping[str, Any] | None, *, fills: bool) -> Any:
        """This rank's part of a validation loader; all of it where a metric has a state that cannot be added up.

        `fills`: all ranks make equally many passes, as FSDP needs.
        """
        return loader if self._must_see_all(metrics) else self.share(loader, fills=fills)

    def adds_up(self, metrics: Mapping[str, Any] | None) -> Ranks | None:
        """The ranks whose evaluations are added up."""
        return None if self._must_see_all(metrics) else self.ranks

    def _must_see_all(self, metrics: Mapping[str, Any] | None) -> bool:
        return any(hasattr(m, "compute") and not hasattr(m, "sync_on_compute") for m in (metrics or {}).values())

    def begin_epoch(self, loader: Any) -> None:
        """Give all ranks the same rng state, so that samplers draw the same order."""
        if self.ranks is not None:
            self.ranks.share_rng_state([torch.default_generator, *generators_of(loader)])

    def is_even(self, stream: Stream[Any] | None) -> bool:
        """Whether all ranks surely have batches of one size in this step."""
        return stream is not None and is_even(stream.loader, stream.origin)

    def is_filler(self, stream: Stream[Any] | None) -> bool:
        """Whether the batch of this step is filler, which counts for nothing."""
        return stream is not None and is_filler(stream.loader, stream.origin)

    # What ranks tell one another

    def tell(
        self,
        progress: Callable[[], list[int]],
        step: Callable[[], TrainingStep],
        weights: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Tell other ranks of this one: its progress (see `Beat`), its pace, and what its weights are."""
        self._weights = weights
        if self.ranks is not None and self._heartbeat is not None:
            self._heartbeat.progress = progress
            self._heartbeat.show = RankFile(self.ranks, lambda: self._items, lambda: _pace(step())).write

    @property
    def telling(self) -> AbstractContextManager[None]:
        """Context of calls that wait for other ranks: an error caused by one of them becomes `RankLost`."""
        return self._heartbeat or nullcontext()

    def while_telling(self, batches: Iterator[Any], items_in: Callable[[Any], int]) -> Iterator[Any]:
        """The same around an epoch in the person's own loop, at the end of which weights are compared."""
        with self.telling:
            for batch in batches:
                yield batch
                self._items += items_in(batch)
            if self.ranks is not None:
                self._total([])

    def counted(self, items: int) -> int:
        """Note the items of this rank; returns those of all ranks, which train on as many."""
        self._items += items
        return items * self.size

    def lost(self, error: BaseException) -> RankLost | None:
        """The reason where another rank caused an error; None for any other error."""
        return None if self._heartbeat is None else self._heartbeat.lost(error)

    def meet(self, epoch: int, batches: int) -> None:
        """After an epoch of unknown length: raise where another rank has more batches of it.

        Its next collective would meet another one of this rank, which ends processes, or adds up what does not belong
        together.
        """
        if self.ranks is None or self._heartbeat is None or (store := self._heartbeat.store) is None:
            return
        number, end = next(_epochs), time.monotonic() + timeout().total_seconds()
        keys = [f"hotloop/batches of rank {rank} in epoch {number}" for rank in range(self.size)]
        mine = f"{self.ranks} had {plural(batches, 'batch', 'batches')} in epoch {epoch}"
        store.set(keys[self.ranks.rank], str(batches))
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

    # Decisions

    def after_step(self, *, stop: bool, save: bool) -> tuple[bool, bool]:
        """Whether to stop and to save between the next two windows; all ranks decide so after the same step."""
        if self._agreement is None:
            return stop, save
        self._calls += 1
        now = time.perf_counter()
        pace, self._since = now - self._since, now
        known = self._agreement.after_step(self._calls, (stop, save), pace)
        if known is not None:
            self._agreed = (self._agreed[0] or known[0], self._agreed[1] or known[1])
        return self._agreed

    def done(self) -> None:
        """Note that the agreed save is done."""
        self._agreed = (self._agreed[0], False)

    def end(self) -> None:
        """Note the last step of a fit, on all ranks."""
        if self._agreement is not None:
            self._agreement.end()
        self._agreed = (False, False)

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any rank; synchronizes all ranks, so between epochs only."""
        return flag if self.ranks is None else bool(self.ranks.largest([float(flag)])[0])

    def largest(self, number: float) -> float:
        """The maximum over all ranks."""
        return number if self.ranks is None else self.ranks.largest([number])[0]

    def reason(self, words: str | None) -> str | None:
        """The first reason that a rank has; None where none has one."""
        if self.ranks is None:
            return words
        return next((each for each in self.ranks.gather(words) if each is not None), None)

    def from_first(self, value: Any) -> Any:
        """The value of rank 0, plain data."""
        return value if self.ranks is None else self.ranks.gather(value)[0]

    def must_agree(self, what: dict[str, Any]) -> None:
        """Raise where ranks differ in these values."""
        if self.ranks is not None:
            with self.telling:
                self.ranks.must_agree(what)
                if self._heartbeat is not None:
                    self._heartbeat.hear()  # all have said a word before

    # Sums

    def means(self, means: dict[str, float], items: float) -> tuple[dict[str, float], int]:
        """Mean losses over the items of all ranks, and their number."""
        if self.ranks is None:
            return means, int(items)
        *sums, count = self._total([*(items * value if items else 0.0 for value in means.values()), items])
        return {name: total / max(count, 1.0) for name, total in zip(means, sums, strict=True)}, int(count)

    def _total(self, numbers: list[float]) -> list[float]:
        """The sums over all ranks; the same collective tells whether these have the same weights still."""
        assert self.ranks is not None
        weights = self._weights()
        each = [0.0] * self.size
        each[self.ranks.rank] = checksum(weights.values())
        told = self.ranks.total([*numbers, *each])
        words = how_apart(self.ranks, weights, told[len(numbers) :])
        if words is not None and not self._is_told_apart:
            self._is_told_apart = True
            warnings.warn(words, PlanWarning, stacklevel=4)
        return told[: len(numbers)]

    def random_of_all(self) -> list[Any]:
        """The rng states of all ranks as plain data, for a checkpoint; a single process saves none besides its own."""
        if self.ranks is None:
            return []
        tensors, data = pack(RngStates(self.ranks.device).state_dict())
        plain = {name: [str(t.dtype).removeprefix("torch."), t.tolist()] for name, t in tensors.items()}
        return list(self.ranks.gather([plain, data]))

    def words(self, model: nn.Module, plan: Plan, loader: Any) -> str | None:
        """A line on how ranks, or the GPUs of a process, train together; None for a single one."""
        batch = self.global_batch(loader)
        if self.ranks is None:
            return None if self.spread is None else self.spread.words(batch)
        kind = "FSDP" if plan.parallel == "fsdp" else "DDP"
        items = "" if batch is None else f": {batch // self.size} items each, {batch} in a step"
        line = f"{plural(self.size, 'rank')} ({kind}){items}; the learning rate is not scaled"
        names = [] if plan.sync_batchnorm else norms_in(model)
        if names:
            line += f"; batch normalisation ({shorten(names, 2)}) uses only the items of its rank"
            line += ": Loop(…, sync_batchnorm=True) uses all" if self.ranks.device.type == "cuda" else ""
        return line

    def by_rank(self, step: TrainingStep) -> tuple[RankPace, ...]:
        """The times of updates of each rank, gathered at the end of a run."""
        if self.ranks is None:
            return ()
        own, waited = _pace(step) or (None, None)
        mine = RankPace(self.ranks.rank, self.ranks.host, str(self.ranks.device), own, waited)
        return tuple(RankPace.from_json(each) for each in self.ranks.gather(mine.to_json()))

    def global_batch(self, loader: Any) -> int | None:
        """Items of a step on all ranks together; None where the loader does not say."""
        size = getattr(loader, "batch_size", None)
        return size * self.size if isinstance(size, int) else None

    def watch_of_all(self, watch: dict[str, Any]) -> dict[str, Any]:
        """The state of a `Watch` with the sums of all ranks in place of this one's."""
        if self.ranks is None:
            return watch
        sums = None if watch["sums"] is None else watch["sums"].tolist()
        own = [float(watch["items"]), *watch["totals"], *(sums or [])]
        items, *rest = self._total(own)
        totals = rest[: len(watch["totals"])]
        added = None if sums is None else torch.tensor(rest[len(totals) :], dtype=watch["sums"].dtype)
        return {**watch, "items": int(items), "totals": totals, "sums": added}

    def nothing_seen(self, watch: dict[str, Any]) -> dict[str, Any]:
        """The state of a `Watch` without sums, for ranks other than the first, which has those of all."""
        nothing = None if watch["sums"] is None else torch.zeros_like(watch["sums"])
        return {**watch, "items": 0, "totals": [0.0 for _ in watch["totals"]], "sums": nothing}


def _pace(step: TrainingStep) -> tuple[float, float] | None:
    """Seconds of an update: own work, and waiting for others; None where none was timed."""
    paces = [eager.across.pace for eager in step.eagers if eager.across is not None and eager.across.pace]
    times = [each for pace in paces if (each := pace.medians()) is not None]
    return (sum(own for own, _ in times), sum(waited for _, waited in times)) if times else None
