"""`Rehearsal`: real training steps from the present state of a loop, all undone afterwards."""

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotloop._torch import DispatchMode, buffers_of, leaves_of, storage_id
from hotloop.device.clock import Clock, synchronize
from hotloop.errors import BadArgument
from hotloop.memory.oom import clear
from hotloop.memory.storages import Following, live_tensors, storages_of
from hotloop.placement import tensors_in
from hotloop.plan import Plan
from hotloop.step.training import TrainingStep
from hotloop.tune.subject import Subject
from hotloop.values.rng import Generator, RngStates
from hotloop.values.snapshot import Snapshot

UPDATES = 2  # that show the peak: in the first the optimizer allocates, in the second that is there from the start
ATTEMPTS = 20  # at them, where the fp16 scaler skips some
TIMED = 0.2  # seconds of steps that are timed
MOST_TIMED = 10  # such steps


def confirm(step: TrainingStep, batch: Any) -> None:
    """Train until the optimizer has its full state, and one step more."""
    for _ in range(ATTEMPTS):
        step(fresh(batch))
        if step.counts.steps >= UPDATES:
            return


def fresh(batch: Any) -> Any:
    """A fresh copy of the containers of a batch: some objectives pop their labels."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch


def time_of(step: TrainingStep, batch: Any) -> float:
    """Seconds of a step on a batch: the median of a few."""
    times: list[float] = []
    while len(times) < MOST_TIMED and sum(times) < TIMED:
        synchronize(step.device)
        given = fresh(batch)
        clock = Clock(step.device)
        step(given)
        times.append(clock.seconds())
    return statistics.median(times)


class Rehearsal:
    """Real steps of a loop in the model's own memory; `rewind` restores the state at the beginning.

    The copy of that state is on the host: on the device it would take memory that is to be measured.
    For the same reason the gradients of the loop are moved to the host.
    """

    def __init__(self, subject: Subject, generators: Iterable[Generator] = ()) -> None:
        self.subject = subject
        self._device = subject.device
        parameters = list(dict.fromkeys(_parameters(subject)))
        tensors = {id(tensor): tensor for tensor in written_tensors(subject)}.values()
        if any(map(is_lazy, tensors)):
            raise BadArgument(
                "the model has weights whose shape its first batch decides", fix="run one batch through the model first"
            )
        self._now: TrainingStep | None = None  # whose plan the model and the optimizers have the form of
        self._random = RngStates(self._device, generators)
        self._gradients = [(p, p.grad.cpu()) for p in parameters if p.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None
        values = [tensor.detach() for tensor in tensors if _is_written(tensor)]
        self._before = Snapshot.of(subject.modules, subject.optimizers).values(values, on_host=True)

    def end(self) -> None:
        """Restore everything, to the bit."""
        self.exchange(None)
        self.rewind()
        clear(self._device)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.to(parameter.device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)  # what is tried is no part of a run's peak

    def rewind(self) -> None:
        """Restore the state at the beginning, without gradients. Earlier CUDA graphs may read freed memory."""
        now = self._now
        self.exchange(None)
        self._before.restore()
        self.rewind_rng()
        self.exchange(now)

    def rewind_rng(self) -> None:
        """Restore the rng states at the beginning, those of the loader included, and no other state."""
        self._random.restore()

    def exchange(self, step: TrainingStep | None) -> None:
        """Switch to another step: the weights keep their values, in the form of its plan."""
        old, self._now = self._now, step
        if step is not old:
            if step is not None and old is not None:
                step.take_over(old)
            self.subject.exchange(old, step)
        if step is not None and not self.subject.model.training:
            self.subject.model.train()

    @contextmanager
    def step(self, plan: Plan) -> Iterator[TrainingStep]:
        """The step of a plan, neither compiled nor captured; the state is rewound before and after the block."""
        # From the second batch of a window on, gradients are there in the forward pass: two show all there is to see.
        windows = min(plan.accumulate, 2)
        plan = replace(plan, compile="off", graph=0, micro_batch=None, accumulate=windows)
        self.rewind()
        step = TrainingStep(self.subject.model, self.subject.objectives, plan, averages=self.subject.averages)
        self.exchange(step)
        try:
            yield step
        finally:
            self.exchange(None)
            self.rewind()

    def peak_of(self, call: Callable[[], object]) -> int | None:
        """Run something; returns the peak of allocated bytes on the device, None where that is unknown."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            call()
            return torch.cuda.max_memory_allocated(self._device)
        if self._device.type == "cpu":
            seen = _Peak(self._device)
            with seen:
                call()
            return seen.highest
        call()
        return None


@contextmanager
def rehearsing(subject: Subject, generators: Iterable[Generator] = ()) -> Iterator[Rehearsal]:
    """A rehearsal that leaves no trace, whatever happens in it."""
    rehearsal = Rehearsal(subject, generators)
    try:
        yield rehearsal
    finally:
        rehearsal.end()


class _Peak(DispatchMode):
    """Peak bytes of tensors on a CPU, counted as `track` does but without its hooks.

    PyTorch cannot free a graph whose backward pass never comes once a hook holds its tensors, and steps may fail here.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._following = Following(device, lambda key, size: None)
        for tensor in live_tensors():
            self._following.see(tensor)
        self.highest = self._following.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in leaves_of((result, args, kwargs)):
            if isinstance(value, Tensor):
                self._following.see(value)
        self.highest = max(self.highest, self._following.live)
        return result


def in_use(device: torch.device) -> int:
    """Bytes of tensors on a device now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    found = {storage_id(s): s.nbytes() for t in live_tensors() for s in storages_of(t) if s.device.type == device.type}
    return sum(found.values())


def _parameters(subject: Subject) -> Iterator[nn.Parameter]:
    for module in subject.modules:
        yield from module.parameters()
    for each in subject.objectives:
        yield from each.parameters


def written_tensors(subject: Subject) -> Iterator[Tensor]:
    """All tensors that a step may write to, except gradients."""
    yield from _parameters(subject)
    for module in (inner for outer in subject.modules for inner in outer.modules()):
        held = (*buffers_of(module).values(), *vars(module).values())
        yield from (value for value in held if isinstance(value, Tensor))
    for optimizer in subject.optimizers:
        settings = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        yield from (tensor for _, tensor in tensors_in([list(optimizer.state.values()), settings]))


def _is_written(tensor: Tensor) -> bool:
    """Whether a step could write to a tensor: not to an expanded one, whose elements share memory."""
    if tensor.is_inference():
        return False
    shared = tensor.layout == torch.strided and any(
        size > 1 and not stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return not shared
