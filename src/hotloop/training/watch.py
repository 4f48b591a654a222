"""`Watch`: mean losses without synchronization, and an error where a loss is not finite."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from hotloop.data import BatchOrigin, Stream
from hotloop.errors import LossNotFinite
from hotloop.text import plural, shorten

READ_EVERY = 0.25  # seconds between two looks at a loss on an accelerator
MOST_FRESH = 256  # losses that wait to be added up
MOST_SINGLE = 32  # single losses that wait to be looked at together
MOST_POINTS = 1000  # of the curve; beyond that every other one is dropped


_NOWHERE = (None,)
_ONE = ("loss",)  # the name of a loss that is alone


class Seen(NamedTuple):
    """Losses of one batch, or of those of a stretch."""

    batch: int  # the last of them since the start of the run, from 1
    epoch: int
    origins: Sequence[BatchOrigin | None]
    losses: Collection[Tensor]  # of each batch, its named losses, on the device
    items: int | Tensor  # in each batch

    def rows(self, names: int) -> Tensor:
        """The losses, one row for each batch."""
        return _stacked([*self.losses]).view(-1, names)


class Watch:
    """Mean losses of an epoch, the latest known loss, and the curve of a run.

    On an accelerator the losses stay there: they are added up and read from time to time, by a copy that nothing
    waits for. A loss that is not finite makes the sum not finite, so the sum alone tells that something happened since
    the last look; the losses since then are kept, and only in that case searched.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        single: bool,
        advice: Sequence[str] = (),
        heard: Callable[[float], None] | None = None,
    ) -> None:
        """`heard` gets each loss that reaches the host: every one on a CPU, elsewhere one of each look."""
        self.device = device
        self._heard = heard
        self._advice = list(advice)  # what to try when the loss is lost
        self._host = device.type == "cpu"
        self.is_in_time = single and self._host  # a bad loss is seen before any weight has changed
        self.names: Collection[str] = ()  # of the losses
        self._batches = 0  # since the start of the run
        self.items: int | Tensor = 0  # in this epoch
        self.latest: float | None = None  # total loss of a batch a moment ago
        self.curve: list[tuple[int, float]] = []
        self._stride = 1
        self._totals: list[float] = []  # sums of the losses, on a CPU
        self._sums: Tensor | None = None  # the same on an accelerator
        self._fresh: list[Seen] = []  # not in the sums yet
        self._recent: deque[Seen] = deque()  # not known to be finite yet
        self._flight: _Flight | None = None
        self._last_look = 0.0
        self._single: list[tuple[Tensor, int, BatchOrigin | None]] = []  # losses, items, origins that are not noted yet
        self._wait = 1  # for so many of them
        self._noted = 0.0  # when that was last done
        self._epoch = 0
        self._stream: Stream[Any] | None = None

    @property
    def batches(self) -> int:
        """Batches since the start of the run."""
        return self._batches + len(self._single)

    @property
    def items_seen(self) -> bool:
        """Whether the epoch had a batch."""
        return bool(self._totals) or self._sums is not None or bool(self._fresh or self._single)

    def begin_epoch(self, epoch: int = 1, stream: Stream[Any] | None = None) -> None:
        """Reset the sums; `stream` is the source of the batches."""
        self._batches += len(self._single)
        self._single = []
        self._epoch, self._stream = epoch, stream
        self.items, self._sums, self._totals = 0, None, []
        self._fresh, self._recent = [], deque()
        self._flight = None

    def _note_single(self) -> None:
        """Add the losses of single batches; the next time as many together as come in half the interval of looks."""
        now = time.monotonic()
        single, self._single = self._single, []
        passed, self._noted = now - self._noted, now
        self._wait = min(max(int(len(single) * READ_EVERY / 2 / max(passed, 1e-9)), 1), MOST_SINGLE)
        self.names = _ONE
        for count, alike in groupby(single, key=itemgetter(1)):
            losses, _, origins = zip(*alike, strict=True)
            self._batches += len(losses)
            self.items = self.items + count * len(losses)
            self._fresh.append(Seen(self._batches, self._epoch, origins, losses, count))

    def see(self, parts: dict[str, Tensor], count: int | Tensor) -> None:
        """Add the losses of one batch, detached; on a CPU they are checked at once, before they reach the weights."""
        if self._host:
            self._see_now(parts, count)
            return
        if len(parts) == 1 and type(count) is int and (loss := parts.get("loss")) is not None and not loss.ndim:
            self._single.append((loss, count, None if self._stream is None else self._stream.origin))
            if len(self._single) >= self._wait:  # of what can wait, nothing is done in each step
                self._note_single()
                self._look(self._noted)
            return
        if self._single:
            self._note_single()
        self.names = parts.keys()
        self._batches += 1
        self.items = self.items + count
        stream, fresh = self._stream, self._fresh
        origins = _NOWHERE if stream is None else (stream.origin,)
        fresh.append(Seen(self._batches, self._epoch, origins, parts.values(), count))
        self._look(time.monotonic())

    def see_stretch(
        self,
        names: Collection[str],
        losses: Collection[Tensor],
        count: int | Tensor,
        origins: Sequence[BatchOrigin | None],
    ) -> None:
        """Add the named losses of several batches on an accelerator, each of `count` items."""
        if self._single:
            self._note_single()
        self.names = names
        self._batches += len(origins)
        self.items = self.items + count * len(origins)
        self._fresh.append(Seen(self._batches, self._epoch, origins, losses, count))
        self._look(time.monotonic())

    def _see_now(self, parts: dict[str, Tensor], items: int | Tensor) -> None:
        self.names = parts.keys()
        numbers = [*map(Tensor.item, parts.values())]
        loss = sum(numbers)
        if not math.isfinite(loss) and not all(map(math.isfinite, numbers)):
            origin = self._stream.origin if self._stream else None
            self._stop(self._batches + 1, self._epoch, origin, numbers, items)
        self._batches += 1  # not before: the batch may be repeated in another precision
        self.items = self.items + items
        totals = self._totals = self._totals or [0.0] * len(numbers)
        for place, number in enumerate(numbers):
            totals[place] += number * float(items)
        self._note(self._batches, loss)

    def end_epoch(self) -> "Ending":
        """The mean losses of the epoch, perhaps still on the device."""
        if self._single:
            self._note_single()
        if self._sums is None and not self._fresh:
            means = {n: total / (float(self.items) or 1.0) for n, total in zip(self.names, self._totals, strict=False)}
            return Ending(self, None, tuple(self.names), self.items, means)
        return Ending(self, self._take_off(), tuple(self.names), self.items, {})

    def means(self) -> dict[str, float]:
        """Mean losses per item over the epoch so far. Synchronizes."""
        return self.end_epoch().means()

    def state_dict(self) -> dict[str, Any]:
        """Losses and counts as plain data and tensors; no synchronization."""
        if self._single:
            self._note_single()
        sums = self._add_fresh() if self._fresh or self._sums is not None else None
        return {
            "names": tuple(self.names),
            "batches": self.batches,
            "items": self.items,
            "latest": self.latest,
            "curve": list(self.curve),
            "stride": self._stride,
            "totals": list(self._totals),
            "sums": sums,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; one from inside an epoch is loaded again when the epoch has begun."""
        self.names, self._batches, self.latest = state["names"], state["batches"], state["latest"]
        self.curve, self._stride = [(batch, loss) for batch, loss in state["curve"]], state["stride"]
        self.items, self._totals = state["items"], list(state["totals"])
        self._sums = None if state["sums"] is None else state["sums"].to(self.device)

    def _add_fresh(self) -> Tensor:
        if self._sums is None:
            # float64 keeps the mean of a long epoch exact; Metal has none.
            exact = torch.float32 if self.device.type == "mps" else torch.float64
            self._sums = torch.zeros(len(self.names), device=self.device, dtype=exact)
        # Counts on the device are not compared: that would wait for it.
        for _, alike in groupby(self._fresh, key=lambda s: s.items if type(s.items) is int else -id(s)):
            group = list(alike)
            count = group[0].items
            rows = _stacked([loss for seen in group for loss in seen.losses]).view(-1, len(self.names))
            total = rows.sum(0, dtype=self._sums.dtype)
            if isinstance(count, Tensor):
                self._sums.add_(total * count)
            else:
                self._sums.add_(total, alpha=count)
        self._recent.extend(self._fresh)
        self._fresh = []
        return self._sums

    def _look(self, now: float) -> None:
        if self._flight is not None and self._flight.landed():
            self._land(self._flight, wait=False)
        self._last_look = self._last_look or now  # the first steps wait for no kernel that looking needs
        if self._flight is None and now - self._last_look > READ_EVERY:
            self._last_look = now
            self._flight = self._take_off()
        elif len(self._fresh) >= MOST_FRESH:
            self._add_fresh()

    def _take_off(self) -> "_Flight":
        sums = self._add_fresh()
        # A run that goes on after the last batch of an epoch has seen none of it; then nothing is noted.
        last = self._recent[-1].rows(len(self.names))[-1] if self._recent else sums
        return _Flight(torch.cat([sums, last.to(sums.dtype)]), self._recent)

    def _land(self, flight: "_Flight", *, wait: bool) -> list[float]:
        """Take the sums of a finished copy, and raise where they are not finite."""
        numbers = flight.numbers(wait=wait)
        if self._flight is flight:
            self._flight = None
        if not all(map(math.isfinite, numbers)):
            self._find_the_culprit(flight.recent)
        while flight.recent and flight.recent[0].batch < flight.batch:
            flight.recent.popleft()
        half = len(numbers) // 2
        if flight.batch:
            self._note(flight.batch, sum(numbers[half:]))
        return numbers[:half]

    def _note(self, batch: int, loss: float) -> None:
        self.latest = loss
        if self._heard is not None:
            self._heard(loss)
        if batch % self._stride == 0 and (not self.curve or self.curve[-1][0] < batch):
            self.curve.append((batch, loss))
            if len(self.curve) > MOST_POINTS:
                self.curve = self.curve[::2]
                self._stride *= 2

    def _find_the_culprit(self, recent: Iterable[Seen]) -> None:
        for seen in recent:
            rows = seen.rows(len(self.names)).tolist()
            for row, (numbers, origin) in enumerate(zip(rows, seen.origins, strict=True)):
                if not all(map(math.isfinite, numbers)):
                    self._stop(seen.batch - len(rows) + 1 + row, seen.epoch, origin, numbers, seen.items)

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
    """The mean losses of an epoch, on the host or still on the device."""

    watch: Watch
    flight: "_Flight | None"
    names: tuple[str, ...]
    items: int | Tensor
    known: dict[str, float]

    def landed(self) -> bool:
        return self.flight is None or self.flight.landed()

    def means(self) -> dict[str, float]:
        """Mean losses per item; synchronizes where they are still on the device."""
        if self.flight is None:
            return self.known
        sums = self.watch._land(self.flight, wait=True)
        return {name: total / (float(self.items) or 1.0) for name, total in zip(self.names, sums, strict=True)}


def _stacked(losses: Sequence[Tensor]) -> Tensor:
    """Losses of any shape in one row."""
    if len(losses) == 1:
        return losses[0].reshape(-1)
    if any(map(torch.Tensor.dim, losses)):
        return torch.cat([loss.reshape(-1) for loss in losses])
    return torch.stack(losses)  # type: ignore[arg-type]  # any sequence will do


class _Flight:
    """A copy of numbers from the device to the host, without blocking."""

    def __init__(self, values: Tensor, recent: "deque[Seen]") -> None:
        self.recent = recent  # what the numbers will say something about
        self.batch = recent[-1].batch if recent else 0
        self._values = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def landed(self) -> bool:
        return self._event is None or self._event.query()

    def numbers(self, *, wait: bool) -> list[float]:
        if wait and self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


def _batch(origin: BatchOrigin | None) -> str:
    return f", batch {origin.number}" if origin else ""
