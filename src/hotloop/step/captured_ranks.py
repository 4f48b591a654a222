"""`CapturedOnRanks`: a step captured with its all-reduces, and how ranks agree on capture, replay or eager."""

import atexit
import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from weakref import WeakSet

from hotloop.errors import PlanWarning
from hotloop.memory.oom import Failure
from hotloop.step.across import Replicas
from hotloop.step.captured import CAN_CHANGE, CapturedStep
from hotloop.step.eager import EagerStep, Parts

VOTE_REPLAY, VOTE_CAPTURE, VOTE_WARM_UP, VOTE_EAGERLY, VOTE_NEVER = map(float, range(5))  # the largest counts


class CapturedOnRanks(CapturedStep):
    """A captured step of one of several ranks, with the all-reduces of DDP.

    NCCL wants all ranks to replay graphs of one capture, or none; so they vote before each step, on the host.
    """

    is_alone = False

    def __init__(self, model: Any, eagers: Sequence[EagerStep], *others: Any, **options: Any) -> None:
        self._replicas = replicas_of(eagers)
        self._ranks = self._replicas[0].ranks
        self._why: str | None = None  # why this rank wants to go on without captures, of which the others learn
        self._is_told = False  # that captures on several ranks are not tested
        for replica in self._replicas:
            replica.begin_captures()
        super().__init__(model, eagers, *others, **options)
        _drop_at_exit().add(self)

    def forget(self) -> None:
        super().forget()
        # Replicas outlive a step that is composed anew.
        self.generation = self._replicas[0].generation = self._replicas[0].generation + 1
        self._forms: Counter[Hashable] = Counter()  # of batches on this rank, of which the usual one is captured

    def abandon(self, why: str) -> None:
        """Stop capturing from the next step on, when all ranks know of it."""
        if self._why is None:
            self._why = why

    def _without_graph(self, batch: Any, form: Any) -> Parts | None:
        """Train on a batch that not all ranks can replay or capture; the largest vote decides how."""
        vote, newest = self._ranks.largest([self._vote(batch, form), float(self.generation)])
        if newest > self.generation:  # another rank has dropped its graphs
            self.forget()
            self.generation = self._replicas[0].generation = int(newest)
        if vote == VOTE_NEVER:
            return self._give_up(self._ranks.gather(self._why), batch)
        if vote == VOTE_EAGERLY:
            return self.run_eagerly(batch)
        if vote == VOTE_CAPTURE:
            self._graphs.clear()  # all capture, or none
        return self._warm_up(batch) if vote == VOTE_WARM_UP else None

    def _vote(self, batch: Any, form: Any) -> float:
        """This rank's vote on a batch, one of `VOTE_…`."""
        self.check_size()
        if not self._is_ready and form is not None:
            self._forms[form] += 1
            self._form = max(self._forms, key=self._forms.__getitem__)
        fits = form is not None and (form == self._form or not self._is_ready)
        fits = fits and not any(each.is_filler() for each in self._replicas)
        if fits and self.comparison_is_due:
            self.compare(batch)
        for why in (each.why_not_captured for each in self._replicas):
            if why is not None:
                self.abandon(why)
        if self.has_captures and (name := self._rates.changed()):
            self.abandon(f"the optimizer's {name} {CAN_CHANGE}")
        if self._why is not None:
            return VOTE_NEVER
        if not fits:
            return VOTE_EAGERLY
        if not self._is_ready:
            return VOTE_WARM_UP
        if self._graphs:
            return VOTE_REPLAY
        return VOTE_CAPTURE if self._is_warm() else VOTE_EAGERLY

    def _after_capture(self, failure: Failure | None, why: str | None, batch: Any) -> Parts | None:
        """Before the first replay: an eager step on all ranks where the capture of one failed."""
        reasons = self._ranks.gather(why if failure is None else "memory ran out while it was captured")
        if any(reason is not None for reason in reasons):
            return self._give_up(reasons, batch)
        if not self._is_told and self._ranks.size > 1:
            self._is_told = True
            warnings.warn(
                f"the step is captured as a CUDA graph with {self._ranks.size} ranks, which is not tested with several"
                " GPUs yet",
                PlanWarning,
                stacklevel=5,
            )
        return None

    def _give_up(self, reasons: Sequence[str | None], batch: Any) -> Parts:
        """Stop capturing on all ranks, for the first of their reasons."""
        rank, why = next((rank, why) for rank, why in enumerate(reasons) if why is not None)
        for replica in self._replicas:
            replica.end_captures()
        self._abandon(f"{why} (rank {rank})" if why and len({*reasons}) > 1 else why)
        return self._run(batch)

    def _is_warm(self) -> bool:
        return all(each.is_warm for each in self._replicas)

    def _around_eager(self) -> AbstractContextManager[Any]:
        return self._side.running()  # to which DDP belongs


def replicas_of(eagers: Sequence[EagerStep]) -> list[Replicas]:
    """The `Replicas` of DDP; none without ranks."""
    return [eager.across for eager in eagers if isinstance(eager.across, Replicas)]


@cache
def _drop_at_exit() -> "WeakSet[CapturedOnRanks]":
    """Steps whose graphs are dropped at exit: NCCL would wait for them forever to destroy a process group."""
    alive: WeakSet[CapturedOnRanks] = WeakSet()

    def drop() -> None:
        for step in [*alive]:
            step.forget()

    atexit.register(drop)
    return alive
