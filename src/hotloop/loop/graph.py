"""The step as a CUDA graph: recorded once, replayed with one call, and left alone where a recording would be wrong."""

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from hotloop.placement.sites import is_users, site_of

WARM = 3  # steps that run before a recording: libraries allocate and choose in them


class CannotCapture(Exception):
    """Why a step cannot be recorded."""


class Recording:
    """Work on a CUDA device, recorded once; `result` is what the work returned, renewed by every replay."""

    def __init__(self, work: Callable[[], Any], side: torch.cuda.Stream) -> None:
        self.gradients: Sequence[Any] = []  # (parameter, gradient) pairs that it writes
        self._graph = torch.cuda.CUDAGraph()
        random = torch.cuda.get_rng_state(side.device)
        current = torch.cuda.current_stream(side.device)
        pool = torch.cuda.graph_pool_handle()
        collects = gc.isenabled()
        gc.disable()  # garbage may hold a graph or an event, and to destroy one ends a capture
        try:
            # Other threads, such as a loader's pinning thread, may go on allocating meanwhile.
            with torch.cuda.graph(self._graph, pool, stream=side, capture_error_mode="thread_local"):
                self.result: Any = work()
        except Exception as error:
            torch.cuda.set_stream(current)  # PyTorch does not come back by itself from a recording that fails
            torch.cuda.synchronize(side.device)
            _revive(side.device, random)
            _end_pool(side.device, pool)
            if isinstance(error, CannotCapture):
                raise
            raise CannotCapture(_reason(error)) from error
        finally:
            if collects:
                gc.enable()

    def replay(self) -> None:
        self._graph.replay()


def _revive(device: torch.device, random: Tensor) -> None:
    """Give the generator a state of its own again: the one of a recording that failed stays locked to it."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())
    torch.cuda.set_rng_state(random, device)


def _end_pool(device: torch.device, pool: Any) -> None:
    """Tell the allocator that a recording which failed is over: else it would never again give cached memory back.

    PyTorch does it itself from 2.12 on, the release of the pool included (pytorch#180395, pytorch#190348), and before
    that where the recording could be ended. Then the graph releases the pool; to do it twice would end the process.
    """
    with suppress(RuntimeError, AttributeError):  # it is over already
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        if TorchVersion(torch.__version__) < "2.12":
            torch._C._cuda_releasePool(device.index or 0, pool)


def _reason(error: BaseException) -> str:
    """What went wrong in a recording, by the innermost line of the person's own code."""
    chain: list[BaseException] = [error]
    while (before := chain[-1].__context__) is not None:  # the first is the cause, the others are its consequences
        chain.append(before)
    for each in reversed(chain):
        frames = [frame for frame, _ in traceback.walk_tb(each.__traceback__) if is_users(frame)]
        said = str(each).strip().splitlines()
        if frames:
            return f"{site_of(frames[-1])} ({said[0] if said else type(each).__name__})"
    return (str(chain[-1]).strip().splitlines() or [type(chain[-1]).__name__])[0]


class Rates:
    """Learning rates where a recording can read them, one for each of its steps.

    The optimizers keep the numbers that schedulers know. Only while a step is recorded do they hold tensors, and
    before each replay the numbers of the moment are copied there.
    """

    def __init__(self, optimizers: Sequence[Optimizer], steps: int, device: torch.device) -> None:
        self._groups = [g for o in optimizers for g in o.param_groups if not isinstance(g["lr"], Tensor)]
        self._tensor = torch.zeros(steps, max(len(self._groups), 1), device=device)
        self._there: list[list[float]] | None = None
        self._others = self._settings()

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """While a step is recorded, the optimizers read their rates from the device."""
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
        """Copy the rates of the steps to come, where they changed, without a wait."""
        if rates != self._there:
            self._there = rates
            if self._groups:
                self._tensor.copy_(torch.tensor(rates, pin_memory=True), non_blocking=True)

    def changed(self) -> str | None:
        """The name of another setting that changed since the recording, which froze it."""
        for now, then in zip(self._settings(), self._others, strict=True):
            for name, value in now.items():
                if not isinstance(value, Tensor) and value != then[name]:
                    return name
        return None

    def _settings(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k not in ("params", "lr", "initial_lr")} for g in self._groups]


@lru_cache
def side_of(device: torch.device) -> "Side":
    """The stream beside the current one on which everything is recorded.

    One for all recordings: cuBLAS keeps a workspace, on some GPUs of 32 MiB, for each stream that it was ever used on.
    """
    return Side(torch.cuda.Stream(device))


@dataclass
class Side:
    """A stream beside the current one, with the order between the two kept."""

    stream: torch.cuda.Stream

    @contextmanager
    def running(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)
