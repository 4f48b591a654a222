"""Several steps in one CUDA graph, over data that lives on the device."""

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hotloop.data.on_device import Resident
from hotloop.step.captured import CAN_CHANGE, CapturedStep
from hotloop.step.captured_graph import CannotCapture, CapturedGraph, Rates
from hotloop.step.constants import made_on_device
from hotloop.step.frozen import Departed
from hotloop.step.inspection import Inspection, Looks, inspected, signature
from hotloop.values.reach import kept_by_capture, look
from hotloop.values.rng import RngStates
from hotloop.values.snapshot import Snapshot
from hotloop.values.tree import map_tensors, tensors_in

Transform = Callable[[Any], Any]
AT_ONCE = 256 * 2**20  # bytes of batches that are gathered together


class Schedules(Protocol):
    """Advances learning rates on the host after each update."""

    def advance(self) -> None: ...

    def snapshot(self) -> Snapshot:
        """A snapshot of what `advance` changes."""


class Stretch:
    """Several steps in one graph, each on a batch gathered on the device by the indices of a sampler."""

    def __init__(self, step: CapturedStep, items: Any, batch: int, steps: int, transform: Transform | None) -> None:
        self.step = step
        self.steps = steps
        self.items = items
        self.batch = batch  # items in each
        self.names: tuple[str, ...] = ()
        self._transform = transform
        self._generation = step.generation
        self._index = torch.zeros(self.steps, batch, dtype=torch.int64, device=step.calls.device)
        self.rates = Rates(step.calls.optimizers, self.steps, step.calls.device)
        self._captured: tuple[CapturedGraph, Tensor] | None = self._capture()  # with the losses that it writes
        step.dependents.add(self)

    def drop(self) -> None:
        """Free the graph and its memory: the step has changed."""
        self._captured = None

    def run(self, drawn: Sequence[Any], schedules: Schedules | None = None) -> Tensor | None:
        """Train on these batches; returns the losses, one row per batch.

        None where a schedule changes a setting that the graph froze, such as momentum: then captures end.
        """
        before = None if schedules is None else schedules.snapshot()
        rates = []
        for number in range(1, self.steps + 1):
            rates.append(self.rates.now())
            if schedules is not None and number % self.step.calls.plan.accumulate == 0:
                schedules.advance()
        if before is not None and (name := self.rates.changed()):
            before.restore()
            self.step.abandon(f"the optimizer's {name} {CAN_CHANGE}")
            return None
        self.rates.send(rates)
        self._index.copy_(_indices(drawn), non_blocking=True)
        assert self._captured is not None
        graph, losses = self._captured
        self.step.replay(graph, self.steps)
        self.step.count(graph, self.steps)
        return losses.clone()  # the next replay writes over them

    def fits(self, step: CapturedStep, items: Any, transform: Transform | None, steps: int, batches: set[int]) -> bool:
        """Whether the graph was captured for these batches."""
        mine = (self.step, self._generation, self.steps, self._transform, {self.batch})
        return self.items is items and mine == (step, step.generation, steps, transform, batches)

    def _capture(self) -> tuple[CapturedGraph, Tensor]:
        rows: list[Tensor] = []
        graph = CapturedGraph(self.rates)
        with self.step.capturing(graph, afresh=True):
            for number, batch in enumerate(self._batches()):
                changed = batch
                if self._transform is not None:
                    with made_on_device():
                        changed = self._transform(batch)
                graph.begin_step(signature(changed))
                with self.rates.of_step(number):
                    size = self.step.calls.size_of(changed)
                    for call in self.step.calls.calls:
                        call(changed, size)
                if isinstance(graph.count, Tensor):
                    raise CannotCapture("the objective counts its items on the device")
                self.names = tuple(graph.losses)
                rows += [value.reshape(()) for value in graph.losses.values()]
            losses = torch.stack(rows).view(self.steps, -1)
        return graph, losses

    def _batches(self) -> Iterator[Any]:
        """The batches, gathered by their indices; all at once, in fewer kernels, where that takes little memory."""
        needed = sum(t[:1].nbytes for _, t in tensors_in(self.items)) * self._index.numel()
        if needed > AT_ONCE:
            yield from (map_tensors(self.items, partial(torch.index_select, dim=0, index=row)) for row in self._index)
            return
        gathered = map_tensors(self.items, partial(torch.index_select, dim=0, index=self._index.flatten()))
        for number in range(self.steps):
            yield map_tensors(gathered, partial(torch.narrow, dim=0, start=number * self.batch, length=self.batch))


class Stretches:
    """The graph of several steps in use, and whether there can be one."""

    def __init__(self) -> None:
        self.latest: Stretch | None = None
        self._refused: CapturedStep | None = None  # the step of which several cannot be captured together
        self._looked_at: Transform | None = None  # the transform of which calls were looked at
        self._looks = Looks(repeats_draws=False)

    def transformed(self, transform: Transform, batch: Any, step: CapturedStep) -> Any:
        """Transform a batch; two calls or more are inspected where the transform may be captured with steps."""
        if self._looked_at is not transform:
            self._looked_at, self._looks = transform, Looks(repeats_draws=False)
        if step.calls.plan.graph < 2 or self._looks.are_enough:
            return transform(batch)
        seen = Inspection()
        roots = {"device_transform": transform}
        before = look(roots, kept_by_capture, hold=True)
        with inspected(step.calls.device, seen):
            changed = transform(batch)
        seen.compare(before, look(roots, kept_by_capture, hold=True))
        self._looks.made.append(seen)
        return changed

    def size(self, step: CapturedStep, resident: Resident) -> int:
        """The number of batches for one CUDA graph."""
        step.check_size()
        if step.calls.plan.graph < 2 or self._refused is step or not step.is_ready or not step.calls.eagers[0].phase[0]:
            return 1
        size = min(step.calls.plan.graph, resident.full_batches)
        return max(1, size - size % step.calls.plan.accumulate)

    def of(
        self, step: CapturedStep | None, resident: Resident, drawn: Sequence[Any], transform: Transform | None
    ) -> Stretch | None:
        """The graph for these batches; None where they run one by one."""
        lengths = {len(each) if isinstance(each, Sized) else 1 for each in drawn}
        if step is None or len(drawn) < max(2, self.size(step, resident)) or len(lengths) > 1 or self._refused is step:
            return None
        if transform is not None and (self._looked_at is not transform or not self._looks.are_enough):
            return None  # its next calls are looked at
        items = resident.items()
        step.frozen.include(transform)
        if step.frozen.comparison_is_due:
            step.compare(resident.gather(items, drawn[0]), transform, self._looks.made)
            if not step.is_ready:
                return None
        if self.latest is None or not self.latest.fits(step, items, transform, len(drawn), lengths):
            self.latest = None  # it holds memory that the next one may need
            capture = partial(self._captured, step, items, max(lengths), len(drawn), transform)
            with suppress(Departed):
                self.latest = step.attempt(capture, max(lengths), lambda why: self._refuse(step))
            if self.latest is None:
                return None
        if name := self.latest.rates.changed():
            step.abandon(f"the optimizer's {name} {CAN_CHANGE}")
            return None
        return self.latest

    def _captured(self, step: CapturedStep, items: Any, batch: int, steps: int, transform: Transform | None) -> Stretch:
        if transform is not None and (why := self._looks.objection()):
            raise CannotCapture(why)
        return Stretch(step, items, batch, steps, transform)

    def _refuse(self, step: CapturedStep) -> None:
        self._refused = step  # batch by batch it can be captured


def _indices(drawn: Sequence[Any]) -> Tensor:
    """The sampler's indices of several batches in pinned memory, for a copy without blocking."""
    if all(isinstance(each, list) for each in drawn):
        return torch.tensor(drawn, dtype=torch.int64, pin_memory=True)
    return torch.stack([torch.as_tensor(each) for each in drawn]).to(torch.int64).pin_memory()


def why_not_captured(transform: Transform, batch: Any, device: torch.device) -> str | None:
    """Why a transform of batches cannot be captured in a CUDA graph; None where it can. Rng states are restored."""
    before = RngStates(device)
    looks = Looks(repeats_draws=False)
    while not looks.are_enough:
        looks.made.append(Inspection())
        with inspected(device, looks.made[-1]):
            transform(batch)
    before.restore()
    return looks.objection()
