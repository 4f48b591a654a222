"""`Watch`: mean losses without synchronization, and an error where a loss is not finite."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from hotloop.data import BatchOrigin, Stream
from hotloop.device.backend import backend_of
from hotloop.errors import LossNotFinite
from hotloop.placement.host_copy import HostCopy, in_one_row
from hotloop.printing.text import plural, shorten
from hotloop.step.eager import See
from hotloop.values.saved import Count, HasState, Positive, Saved, not_saved_there

READ_EVERY = 0.25  # seconds between two looks at a loss on an accelerator
MOST_FRESH = 256  # losses that wait to be read, each in a tensor of its own
MOST_SINGLE = 32  # single losses that wait to be looked at together
MOST_POINTS = 1000  # of the curve; beyond that every other one is dropped


_NOWHERE = (None,)
_ONE = ("loss",)  # the name of a loss that is alone


class Seen(NamedTuple):
    """One batch, or those of a stretch."""

    batch: int  # the last of them since the start of the run, from 1
    origins: Sequence[BatchOrigin | None]  # of each batch
    items: int | Tensor  # in each batch


class EpochLosses:
    """The losses of an epoch: added up on the host, or on their way there."""

    def __init__(self, epoch: int, totals: Sequence[float] = ()) -> None:
        self.epoch = epoch
        self.totals = list(totals)  # of each named loss, weighed by items
        self.flights: deque[_Flight] = deque()
        self._seen: list[Seen] = []  # whose losses are still on the device alone
        self._losses: list[Tensor] = []  # of these, batch by batch

    @property
    def is_empty(self) -> bool:
        """Whether there was no batch."""
        return not (self.totals or self.flights or self._seen)

    def add(self, seen: Seen, losses: Collection[Tensor]) -> None:
        """Note losses that stay on the device for now."""
        self._seen.append(seen)
        self._losses.extend(losses)
        if len(self._losses) >= MOST_FRESH:
            self._losses = [in_one_row(self._losses)]

    def take_off(self) -> None:
        """Send all that is still on the device alone to the host, without waiting."""
        if self._seen:
            self.flights.append(_Flight(self._seen, self._losses))
            self._seen, self._losses = [], []

    def has_landed(self) -> bool:
        """Whether all that was sent has reached the host."""
        return not self.flights or self.flights[-1].has_landed()

    def unread(self, names: int) -> Tensor | None:
        """Sums of all that is not in the totals, computed on the device; None where nothing is."""
        sums: Tensor | None = None
        for seen, losses in (*((flight.seen, flight.losses) for flight in self.flights), (self._seen, self._losses)):
            if seen:
                added = _sums(seen, in_one_row(losses).view(-1, names))
                sums = added if sums is None else sums + added
        return sums


class SingleLosses:
    """Losses of single batches: of what can wait, nothing is done in each step."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, int, BatchOrigin | None]] = []
        self._most = 1  # that wait: about as many as come in half the interval of looks
        self._taken = 0.0  # when they were last taken

    def add(self, loss: Tensor, items: int, origin: BatchOrigin | None) -> bool:
        """Let a loss wait; returns whether all of them are to be taken now."""
        self.waiting.append((loss, items, origin))
        return len(self.waiting) >= self._most

    def take(self, now: float) -> Iterator[tuple[int, tuple[Tensor, ...], tuple[BatchOrigin | None, ...]]]:
        """The losses that wait, by the items of their batches: items, losses, origins."""
        waiting, self.waiting = self.waiting, []
        passed, self._taken = now - self._taken, now
        self._most = min(max(int(len(waiting) * READ_EVERY / 2 / max(passed, 1e-9)), 1), MOST_SINGLE)
        for items, alike in groupby(waiting, key=itemgetter(1)):
            losses, _, origins = zip(*alike, strict=True)
            yield items, losses, origins

    def drop(self) -> None:
        """Forget those that wait."""
        self.waiting = []


class Watch(HasState):
    """Mean losses of an epoch, the latest known loss, and the curve of a run.

    On an accelerator the losses stay there, and are read from time to time, by a copy that nothing waits for.
    """

    name = "loop.watch"
    names: Saved[tuple[str, ...]]  # of the losses
    _batches: Saved[Count] = 0  # since the start of the run
    items: Saved[Count | Tensor] = 0  # in this epoch
    latest: Saved[float | None] = None  # total loss of a batch a moment ago
    curve: Saved[list[tuple[int, float]]]  # batches and their losses
    _stride: Saved[Positive] = 1  # of the curve, in batches
    totals: Saved[list[float]]  # of each loss in this epoch, weighed by items: what has reached the host
    sums: Saved[Tensor | None]  # the same of what has not

    def __init__(
        self,
        device: torch.device,
        *,
        single: bool,
        advice: Sequence[str] = (),
    ) -> None:
        is_host = backend_of(device).is_host
        self.see: See = self.see_now if is_host else self.see_later  # of each batch
        self._heard: Callable[[float], None] | None = None
        self._advice = list(advice)  # what to try when the loss is lost
        self.is_in_time = single and is_host  # a bad loss is seen before any weight has changed
        self.names, self.curve = (), []
        self._losses = EpochLosses(0)
        self._single = SingleLosses()  # that are not in those yet
        self._last_look = 0.0
        self._stream: Stream[Any] | None = None

    def listen(self, heard: Callable[[float], None]) -> None:
        """Call it with each loss that reaches the host: every one on a CPU, elsewhere one of each look."""
        self._heard = heard

    @property
    def batches(self) -> int:
        """Batches since the start of the run."""
        return self._batches + len(self._single.waiting)

    @property
    def items_seen(self) -> bool:
        """Whether the epoch had a batch."""
        return bool(self._single.waiting) or not self._losses.is_empty

    def begin_epoch(self, epoch: int = 1, stream: Stream[Any] | None = None) -> None:
        """Reset the sums; `stream` is the source of the batches."""
        self._batches += len(self._single.waiting)
        self._single.drop()
        self._stream = stream
        self.items, self._losses = 0, EpochLosses(epoch)

    def _note_single(self) -> float:
        """Add the losses of single batches that wait; returns the time."""
        now = time.monotonic()
        if self._single.waiting:
            self.names = _ONE
            for items, losses, origins in self._single.take(now):
                self._add(losses, items, origins)
        return now

    def _add(self, losses: Collection[Tensor], items: int | Tensor, origins: Sequence[BatchOrigin | None]) -> None:
        """Add the losses of batches, each of so many items."""
        self._batches += len(origins)
        self.items = self.items + items * len(origins)
        self._losses.add(Seen(self._batches, origins, items), losses)

    def see_later(self, parts: dict[str, Tensor], count: int | Tensor) -> None:
        """Add the losses of one batch, detached, which stay on the device for now."""
        if len(parts) == 1 and type(count) is int and (loss := parts.get("loss")) is not None and not loss.ndim:
            if self._single.add(loss, count, None if self._stream is None else self._stream.origin):
                self._look(self._note_single())
            return
        origins = _NOWHERE if self._stream is None else (self._stream.origin,)
        self.see_stretch(parts.keys(), parts.values(), count, origins)

    def see_stretch(
        self,
        names: Collection[str],
        losses: Collection[Tensor],
        count: int | Tensor,
        origins: Sequence[BatchOrigin | None],
    ) -> None:
        """Add the named losses of several batches on an accelerator, each of `count` items."""
        now = self._note_single()
        self.names = tuple(names)
        self._add(losses, count, origins)
        self._look(now)

    def see_now(self, parts: dict[str, Tensor], items: int | Tensor) -> None:
        """The same on a CPU, where they are checked at once, before they reach the weights."""
        self.names = tuple(parts)
        numbers = [*map(Tensor.item, parts.values())]
        loss = sum(numbers)
        if not math.isfinite(loss) and not all(map(math.isfinite, numbers)):
            origin = self._stream.origin if self._stream else None
            self._stop(self._batches + 1, self._losses.epoch, origin, numbers, items)
        self._batches += 1  # not before: the batch may be repeated in another precision
        self.items = self.items + items
        totals = self._losses.totals
        if not totals:
            totals += [0.0] * len(numbers)
        for place, number in enumerate(numbers):
            totals[place] += number * float(items)
        self._note(self._batches, loss)

    def end_epoch(self) -> "Ending":
        """The mean losses of the epoch, perhaps still on the device."""
        self._note_single()
        self._losses.take_off()
        return Ending(self, self._losses, self.names, self.items)

    def means(self) -> dict[str, float]:
        """Mean losses per item over the epoch so far. Synchronizes."""
        return self.end_epoch().means()

    def state_dict(self) -> dict[str, Any]:
        """Losses and counts as plain data and tensors; no synchronization."""
        self._note_single()
        self.totals = list(self._losses.totals)
        self.sums = self._losses.unread(len(self.names))
        return super().state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        losses, items, sums = len(state["names"]), state["items"], state["sums"]
        is_sound = not isinstance(items, Tensor) or items.numel() == 1
        if sums is not None:
            is_sound = is_sound and sums.shape == (losses,) and sums.is_floating_point()
        if len(state["totals"]) != losses and sums is None:
            is_sound = is_sound and type(items) is int and items == 0
        if not is_sound:
            raise not_saved_there("loop.watch")

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Load a `state_dict`; one from inside an epoch is loaded again when the epoch has begun."""
        super().load(state, undo)
        self._single.drop()
        if self.sums is not None:
            pairs = zip(self.totals or [0.0] * len(self.sums), self.sums.tolist(), strict=True)
            self.totals = [total + unread for total, unread in pairs]
        self._losses = EpochLosses(self._losses.epoch, self.totals)

    def _look(self, now: float) -> None:
        flights = self._losses.flights
        if flights and flights[0].has_landed():
            self._land(self._losses)
        self._last_look = self._last_look or now  # nothing is read during the first steps, in which libraries load
        if not flights and now - self._last_look > READ_EVERY:
            self._last_look = now
            self._losses.take_off()

    def _land(self, losses: EpochLosses) -> None:
        """Add up the losses of the copy that was begun first, and raise where one is not finite."""
        flight = losses.flights.popleft()
        rows, items = flight.read()
        if not np.isfinite(rows).all():
            self._find_the_culprit(losses.epoch, flight.seen, rows)
        # One after the other, so that the sum does not depend on when they were read.
        before = losses.totals or [0.0] * rows.shape[1]
        losses.totals[:] = np.cumsum(np.vstack([before, rows * items[:, None]]), 0)[-1].tolist()
        self._note(flight.seen[-1].batch, float(rows[-1].sum()))

    def _note(self, batch: int, loss: float) -> None:
        self.latest = loss
        if self._heard is not None:
            self._heard(loss)
        if batch % self._stride == 0 and (not self.curve or self.curve[-1][0] < batch):
            self.curve.append((batch, loss))
            if len(self.curve) > MOST_POINTS:
                self.curve = self.curve[::2]
                self._stride *= 2

    def _find_the_culprit(self, epoch: int, every: Sequence[Seen], rows: Any) -> None:
        numbers = iter(rows.tolist())
        for seen in every:
            for batch, origin in enumerate(seen.origins, seen.batch - len(seen.origins) + 1):
                losses = next(numbers)
                if not all(map(math.isfinite, losses)):
                    self._stop(batch, epoch, origin, losses, seen.items)

    def _stop(
        self, batch: int, epoch: int, origin: BatchOrigin | None, losses: list[float], items: int | Tensor
    ) -> NoReturn:
        said = ", ".join(f"{name} = {value}" for name, value in zip(self.names, losses, strict=True))
        lines = [f"the loss is not finite at step {batch} (epoch {epoch}{_batch(origin)}): {said}"]
        advice = self._advice
        if items == 0:
            lines.append("the batch is empty, and the mean of nothing is NaN")
            advice = ["leave out empty batches, in the loader or its sampler"]
        if origin and origin.indices:
            lines.append(f"samples of that batch: {shorten([str(i) for i in origin.indices], 16)}")
            broken = origin.broken_samples()
            if broken:
                lines.append(f"samples that hold NaN or infinity themselves: {shorten([str(i) for i in broken], 16)}")
                advice = ["clean or drop those samples"]
        later = max(0, self.batches - batch)
        if self.is_in_time:
            lines.append("the weights are still those of the step before")
        else:
            lines.append(
                f"the weights have diverged ({plural(later, 'step')} ran before it was noticed); do not keep them"
            )
        raise LossNotFinite("\n  ".join(lines), fix="; ".join(advice) or None)


@dataclass(frozen=True)
class Ending:
    """The mean losses of an epoch, on the host or on their way there."""

    watch: Watch
    losses: EpochLosses
    names: tuple[str, ...]
    items: int | Tensor

    def landed(self) -> bool:
        return self.losses.has_landed()

    def means(self) -> dict[str, float]:
        """Mean losses per item; waits for those that have not reached the host."""
        while self.losses.flights:
            self.watch._land(self.losses)
        items = float(self.items) or 1.0
        return {name: total / items for name, total in zip(self.names, self.losses.totals, strict=False)}


class _Flight:
    """Losses of some batches on their way to the host."""

    def __init__(self, seen: list[Seen], losses: list[Tensor]) -> None:
        self.seen, self.losses = seen, losses
        self._counts = HostCopy([each.items for each in seen if isinstance(each.items, Tensor)])
        self._values = HostCopy(losses)  # the last that is sent, and lands

    def has_landed(self) -> bool:
        return self._values.has_landed()

    def read(self) -> tuple[Any, Any]:
        """The losses, one row for each batch, and the items of each; waits for them."""
        values, counts = self._values.numbers(), iter(self._counts.numbers())
        items = [next(counts) if isinstance(seen.items, Tensor) else seen.items for seen in self.seen]
        of_batches = np.repeat(np.array(items, np.float64), [len(seen.origins) for seen in self.seen])
        return values.reshape(len(of_batches), -1), of_batches


def _sums(every: Sequence[Seen], rows: Tensor) -> Tensor:
    """The sums of losses, weighed by items, on the device."""
    exact = backend_of(rows.device).widest_float  # keeps the mean of a long epoch exact
    sums = torch.zeros(rows.shape[1], device=rows.device, dtype=exact)
    first = 0
    # Counts on the device are not compared: that would wait for it.
    for _, alike in groupby(every, key=lambda seen: seen.items if type(seen.items) is int else -id(seen)):
        group = list(alike)
        last, items = first + sum(len(seen.origins) for seen in group), group[0].items
        total, first = rows[first:last].sum(0, dtype=exact), last
        if isinstance(items, Tensor):
            sums.add_(total * items)
        else:
            sums.add_(total, alpha=items)
    return sums


def _batch(origin: BatchOrigin | None) -> str:
    return f", batch {origin.number}" if origin else ""
