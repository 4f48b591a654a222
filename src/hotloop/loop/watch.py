"""`Watch` keeps an eye on the loss without waiting for the device, and stops a run whose loss is lost."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from hotloop.data import Origin
from hotloop.errors import LossNotFinite
from hotloop.text import plural, shorten

READ_EVERY = 0.1  # seconds between two looks at a loss on an accelerator
MOST_POINTS = 1000  # of the curve; beyond that every other one is dropped


@dataclass(slots=True)
class Seen:
    """One batch as it went by."""

    batch: int  # since the start of the run, from 1
    epoch: int
    origin: Origin | None
    values: Tensor  # its losses, on the device


class Watch:
    """Mean losses of an epoch, the loss of a moment ago, and the curve of a run.

    On an accelerator the sums stay there and are read from time to time by a copy that nothing waits for. A loss that
    is not finite makes the sum not finite, so the sum alone tells that something happened since the last look; the
    batches since then are kept, and only in that case searched.
    """

    def __init__(self, device: torch.device, *, single: bool, advice: Sequence[str] = ()) -> None:
        self.device = device
        self._advice = list(advice)  # what to try when the loss is lost
        self._host = device.type == "cpu"
        self._in_time = single and self._host  # a bad loss is seen before any weight has changed
        self.names: tuple[str, ...] = ()
        self.batches = 0  # since the start of the run
        self.items: int | Tensor = 0  # in this epoch
        self.latest: float | None = None  # total loss of a batch a moment ago
        self.curve: list[tuple[int, float]] = []
        self._stride = 1
        self._totals: list[float] = []  # sums of the losses, on a CPU
        self._sums: Tensor | None = None  # the same on an accelerator
        self._recent: deque[Seen] = deque()
        self._flight: _Flight | None = None
        self._last_look = 0.0

    def begin_epoch(self) -> None:
        self.items, self._sums, self._totals = 0, None, []
        self._recent.clear()
        self._flight = None

    def see(self, parts: dict[str, Tensor], count: int | Tensor, epoch: int, origin: Origin | None) -> None:
        """Note the losses of one batch; on a CPU they are checked at once, before they reach the weights."""
        self.names = tuple(parts)
        self.batches += 1
        self.items = self.items + count
        if self._host:
            self._see_now([value.item() for value in parts.values()], float(count), epoch, origin)
            return
        values = _one_tensor([value.detach() for value in parts.values()])
        self._recent.append(Seen(self.batches, epoch, origin, values))
        self._add(values, count)
        self._look()

    def _see_now(self, numbers: list[float], count: float, epoch: int, origin: Origin | None) -> None:
        if not all(map(math.isfinite, numbers)):
            self._stop(Seen(self.batches, epoch, origin, torch.tensor(numbers)), numbers)
        before = self._totals or [0.0] * len(numbers)
        self._totals = [total + number * count for total, number in zip(before, numbers, strict=True)]
        self._note(self.batches, sum(numbers))

    def means(self) -> dict[str, float]:
        """Mean losses per item over the epoch so far. Waits for the device."""
        if self._totals:
            return {name: total / float(self.items) for name, total in zip(self.names, self._totals, strict=True)}
        if self._sums is None:
            return {}
        if self._recent:
            self._land(self._take_off(), wait=True)
        return dict(zip(self.names, (self._sums / self.items).tolist(), strict=True))

    def _add(self, values: Tensor, count: int | Tensor) -> None:
        if self._sums is None:
            # float64 keeps the mean of a long epoch exact; Metal has none.
            exact = torch.float32 if self.device.type == "mps" else torch.float64
            self._sums = torch.zeros(len(values), device=self.device, dtype=exact)
        if isinstance(count, Tensor):
            self._sums.add_(values * count)
        else:
            self._sums.add_(values, alpha=count)  # one kernel

    def _look(self) -> None:
        if self._flight is not None and self._flight.landed():
            self._land(self._flight, wait=False)
        now = time.monotonic()
        if self._flight is None and now - self._last_look > READ_EVERY:
            self._last_look = now
            self._flight = self._take_off()

    def _take_off(self) -> "_Flight":
        assert self._sums is not None
        last = self._recent[-1]
        return _Flight(torch.cat([self._sums, last.values.to(self._sums.dtype)]), last.batch)

    def _land(self, flight: "_Flight", *, wait: bool) -> None:
        numbers = flight.numbers(wait=wait)
        self._flight = None
        if not all(map(math.isfinite, numbers)):
            self._find_the_culprit()
        while self._recent and self._recent[0].batch < flight.batch:
            self._recent.popleft()
        self._note(flight.batch, sum(numbers[len(numbers) // 2 :]))

    def _note(self, batch: int, loss: float) -> None:
        self.latest = loss
        if batch % self._stride == 0 and (not self.curve or self.curve[-1][0] < batch):
            self.curve.append((batch, loss))
        if len(self.curve) > MOST_POINTS:
            self.curve = self.curve[::2]
            self._stride *= 2

    def _find_the_culprit(self) -> None:
        for seen in self._recent:
            numbers = seen.values.tolist()
            if not all(map(math.isfinite, numbers)):
                self._stop(seen, numbers)

    def _stop(self, seen: Seen, losses: list[float]) -> NoReturn:
        said = ", ".join(f"{name} = {value}" for name, value in zip(self.names, losses, strict=True))
        lines = [f"the loss is not finite at step {seen.batch} (epoch {seen.epoch}{_batch(seen.origin)}): {said}"]
        advice = self._advice
        if seen.origin and seen.origin.indices:
            lines.append(f"samples of that batch: {shorten([str(i) for i in seen.origin.indices], 16)}")
            broken = seen.origin.broken_samples()
            if broken:
                lines.append(f"samples that hold NaN or infinity themselves: {shorten([str(i) for i in broken], 16)}")
                advice = ["clean or drop those samples"]
        later = self.batches - seen.batch
        if self._in_time:
            lines.append("the weights are still those of the step before")
        else:
            lines.append(
                f"the weights are spoilt ({plural(later, 'step')} ran before it was noticed); do not keep them"
            )
        raise LossNotFinite("\n  ".join(lines), fix="; ".join(advice) or None)


def _one_tensor(values: list[Tensor]) -> Tensor:
    """The losses in one row; a single one needs no copy."""
    return values[0].reshape(1) if len(values) == 1 else torch.stack([value.reshape(()).float() for value in values])


class _Flight:
    """Numbers on their way from the device to the host."""

    def __init__(self, values: Tensor, batch: int) -> None:
        self.batch = batch
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


def _batch(origin: Origin | None) -> str:
    return f", batch {origin.number}" if origin else ""
