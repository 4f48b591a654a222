"""CUDA graphs: capture and replay of work, and learning rates on the device for replays."""

import gc
import traceback
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop._torch import end_capture_pool
from hotloop.device.backend import backend_of
from hotloop.placement.sites import is_users, site_of
from hotloop.values.tree import map_tensors, tensors_in

WARM_UP = 3  # steps that run before a capture: libraries allocate and choose in them


Gradients = Sequence[tuple[Tensor, Tensor | None]]  # of parameters


class CannotCapture(Exception):
    """Raised where a step cannot be captured; the message is the reason."""


def renew_accumulation(parameters: Iterable[Tensor]) -> None:
    """Make gradients accumulate on the stream of the next pass.

    They accumulate on the stream of an earlier pass while its autograd graph is alive, as through the last loss of a
    loop by hand, and CUDA cannot capture its default stream. Setting a parameter's data to another dtype resets that.
    """
    for parameter in parameters:
        data = parameter.data
        if type(data) is Tensor:
            parameter.data = data.new_empty(0, dtype=torch.float16 if data.dtype != torch.float16 else torch.float32)
            parameter.data = data


class StaticBatch(NamedTuple):
    """A copy of a batch for graphs to read."""

    batch: Any
    buffers: list[Tensor]  # its tensors, into which later batches are written

    @classmethod
    def of(cls, batch: Any) -> "StaticBatch":
        static = map_tensors(batch, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))
        return cls(static, [tensor.detach() for _, tensor in tensors_in(static)])

    def fresh(self) -> Any:
        """The batch for a captured step, in fresh views: a gradient of the input does not stay on the copy."""
        return map_tensors(self.batch, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


NO_BATCH = StaticBatch(None, [])


class CapturedGraph:
    """Captured work on a CUDA device; every replay writes `losses` again."""

    def __init__(self, rates: "Rates", static: StaticBatch = NO_BATCH) -> None:
        self.rates, self.static = rates, static  # that it reads
        self.losses: dict[str, Tensor] = {}  # of the last step, by name
        self.count: int | Tensor = 0  # of the items that they are means over
        self.form: Hashable = None  # of its batch
        self.gradients: Gradients = []  # that it writes
        self.norms: Sequence[Tensor] = ()  # of the gradient of each objective, where they are clipped
        self._held: Sequence[Tensor] = ()  # that it uses, and that nobody else may hold
        self._graph = torch.cuda.CUDAGraph()

    def begin_step(self, form: Hashable) -> None:
        """The next calls capture a step on a batch of this form."""
        self.losses, self.form = {}, form

    @contextmanager
    def capturing(self, stream: torch.Stream, pool: Any = None) -> Iterator[None]:
        """Capture the calls inside the block, which do not run; `pool` is memory shared with other graphs."""
        backend = backend_of(stream.device)
        rng_state = backend.get_rng_state()
        current = backend.current_stream()
        pool = backend.graph_pool() if pool is None else pool
        collects = gc.isenabled()
        gc.disable()  # garbage may hold a graph or an event, and to destroy one ends a capture
        try:
            with backend.capturing(self._graph, stream, pool):
                yield
        except Exception as error:
            backend.set_stream(current)  # PyTorch does not come back by itself from a capture that fails
            backend.synchronize()
            _unlock_rng(stream)
            backend.set_rng_state(rng_state)
            end_capture_pool(stream.device, pool)
            if isinstance(error, CannotCapture):
                raise
            if interrupts := [each for each in _chain(error) if isinstance(each, KeyboardInterrupt)]:
                raise interrupts[0] from error  # the end of the capture that it broke off has failed, too
            raise CannotCapture(_reason(error)) from error
        finally:
            if collects:
                gc.enable()

    def note_losses(self, losses: dict[str, Tensor], count: int | Tensor) -> None:
        """Take the losses of an objective in the step that is captured."""
        self.losses |= losses
        self.count = count

    def keep(self, gradients: Gradients, norms: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        """Keep what was captured: what is replaced must not give its memory to others."""
        self.gradients, self.norms, self._held = gradients, norms, held

    def hide_gradients(self) -> None:
        """Leave no gradients on the parameters: their memory is that of the next graph, too."""
        self.gradients = [(parameter, None) for parameter, _ in self.gradients]

    def replay(self) -> None:
        self._graph.replay()


def _unlock_rng(stream: torch.Stream) -> None:
    """Unlock the generator, which a failed capture holds until another capture has ended.

    A new state for the generator would not do: earlier graphs would keep the old one.
    """
    number, backend = torch.zeros((), device=stream.device), backend_of(stream.device)
    with backend.capturing(torch.cuda.CUDAGraph(), stream):
        number.zero_()


def _reason(error: BaseException) -> str:
    """Why a capture failed, with the innermost line of the person's own code."""
    chain = _chain(error)
    for each in reversed(chain):
        frames = [frame for frame, _ in traceback.walk_tb(each.__traceback__) if is_users(frame)]
        said = str(each).strip().splitlines()
        if frames:
            return f"{site_of(frames[-1])} ({said[0] if said else type(each).__name__})"
    return (str(chain[-1]).strip().splitlines() or [type(chain[-1]).__name__])[0]


def _chain(error: BaseException) -> list[BaseException]:
    """An error and its causes, the first cause last."""
    chain = [error]
    while (before := chain[-1].__context__) is not None:
        chain.append(before)
    return chain


class Rates:
    """Learning rates on the device for a CUDA graph, one for each of its steps.

    The optimizers keep their numbers for schedulers. They hold tensors only during a capture; before each replay the
    present numbers are copied there.
    """

    def __init__(self, optimizers: Sequence[Optimizer], steps: int, device: torch.device) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._tensor = torch.zeros(steps, max(len(self._groups), 1), dtype=torch.float32, device=device)
        self._there: list[list[float]] | None = None
        self._others = self._settings()
        self.send([self.now()] * steps)

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """Inside the block, which is captured, the optimizers read their rates from the device."""
        before = [group["lr"] for group in self._groups]
        for i, group in enumerate(self._groups):
            group["lr"] = self._tensor[step, i]
        try:
            yield
        finally:
            for group, rate in zip(self._groups, before, strict=True):
                group["lr"] = rate

    def now(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups]

    def send(self, rates: list[list[float]]) -> None:
        """Copy the rates of the next steps, where they changed, without blocking."""
        if rates != self._there:
            self._there = rates
            if self._groups:
                self._tensor.copy_(torch.tensor(rates, dtype=torch.float32, pin_memory=True), non_blocking=True)

    def changed(self) -> str | None:
        """The name of another setting, frozen by the capture, that has changed since."""
        for now, then in zip(self._settings(), self._others, strict=True):
            for name, value in now.items():
                if not isinstance(value, Tensor) and value != then.get(name, value):  # a scheduler adds its own
                    return name
        return None

    def _settings(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k not in ("params", "lr", "initial_lr")} for g in self._groups]


@lru_cache
def capture_stream(device: torch.device) -> "CaptureStream":
    """The side stream for all captures.

    One for all: cuBLAS keeps a workspace, on some GPUs of 32 MiB, for each stream that it was ever used on.
    """
    return CaptureStream(backend_of(device).new_stream())


@dataclass
class CaptureStream:
    """A side stream that stays ordered with the current one."""

    stream: torch.Stream

    @contextmanager
    def running(self) -> Iterator[None]:
        backend = backend_of(self.stream.device)
        current = backend.current_stream()
        self.stream.wait_stream(current)
        try:
            with backend.on_stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)
