"""`release` gives memory back and says what is still held; `EmptyCacheWatch` notices who does so in every step."""

import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import storage_id
from hotloop.errors import MemoryWarning
from hotloop.memory.holders import holder_of
from hotloop.memory.oom import clear
from hotloop.memory.storages import storages_of
from hotloop.memory.usage import Usage, usage
from hotloop.placement import tensors_in
from hotloop.placement.sites import Site, user_site
from hotloop.printing.text import duration, plural, shorten, size
from hotloop.records import Record


@dataclass(frozen=True)
class Released(Record):
    """What a `release` gave back to the device, and what it could not."""

    before: Usage
    after: Usage
    given_back: int | None  # bytes of this process; None where the device does not tell
    held: int  # bytes in the tensors that were handed in, which live on
    holders: tuple[str, ...]  # what keeps them

    def __str__(self) -> str:
        lines = [f"{self.before.device}: {size(self.given_back)} given back"]
        if self.held:
            by = f" by {shorten(list(self.holders))}" if self.holders else ""
            lines.append(f"{size(self.held)} still held{by}; `del` those names first")
        return "\n".join([*lines, str(self.after)])


def release(*holders: Any, device: str | torch.device | None = None) -> Released:
    """Give memory that nothing needs back to the device: collect garbage, then empty the allocator's cache.

    Only what no name refers to can be given back, so `del` the names (model, optimizer, loss, output) before the call.
    What is handed in is not freed, which no function can do to its caller: it is looked at, and who keeps its tensors
    is said. The device is that of the first tensor handed in, else the accelerator, else the CPU. Not for the inside
    of a loop: the allocator uses its cache again at once, and asking the device for memory anew makes it wait.

    >>> release().held
    0
    """
    tensors = list(_tensors_in(holders))
    target = torch.device(device) if device is not None else _device_of(tensors)
    before = usage(target)
    gc.collect()
    if target.type == "cuda":
        torch.cuda.synchronize(target)  # blocks that other streams still use come back only when those are done
        torch.cuda.empty_cache()
    elif target.type == "mps":
        torch.mps.empty_cache()
    after = usage(target)
    on_device = [tensor for tensor in tensors if tensor.device.type == target.type]
    storages = {storage_id(s): s.nbytes() for tensor in on_device for s in storages_of(tensor)}
    return Released(before, after, _given_back(before, after), sum(storages.values()), _names(holders))


def _tensors_in(holders: Iterable[Any]) -> Iterable[Tensor]:
    for holder in holders:
        if isinstance(holder, nn.Module):
            for tensor in (*holder.parameters(), *holder.buffers()):
                yield from (tensor,) if tensor.grad is None else (tensor, tensor.grad)
        elif isinstance(holder, Optimizer):
            yield from (tensor for state in holder.state.values() for _, tensor in tensors_in(state))
        else:
            yield from (tensor for _, tensor in tensors_in(holder))


def _device_of(tensors: list[Tensor]) -> torch.device:
    if tensors:
        return tensors[0].device
    started = torch.accelerator.is_available() and (torch.cuda.is_initialized() or torch.backends.mps.is_available())
    return torch.accelerator.current_accelerator() or torch.device("cpu") if started else torch.device("cpu")


def _given_back(before: Usage, after: Usage) -> int | None:
    """What the process has less of, by the first figure that the device tells."""
    for name in ("reserved", "process"):
        was, now = getattr(before, name), getattr(after, name)
        if was is not None and now is not None:
            return int(was - now)
    return None


def _names(holders: tuple[Any, ...]) -> tuple[str, ...]:
    """The variables that keep what was handed in."""
    found = (holder_of(holder, {id(holders)}) for holder in holders)
    return tuple(dict.fromkeys(str(holder) for holder in found if holder is not None))


@dataclass
class EmptyCacheWatch:
    """Warns once when somebody empties the cache of CUDA's allocator in every step, with what that costs.

    Inside `with EmptyCacheWatch() as watch:`, call `watch.step()` after each step. A name that was imported before
    (`from torch.cuda import empty_cache`) is not seen.
    """

    limit: int = 5  # steps in a row that empty the cache before it is said
    seconds: float = 0.0  # that the calls took by themselves; what the next step waits comes on top
    steps: int = 0
    sites: Counter[Site | None] = field(default_factory=Counter)
    _called: bool = False
    _streak: int = 0
    _warned: bool = False
    _original: Any = None
    _memory: Any = None

    def __enter__(self) -> Self:
        self._original, self._memory = torch.cuda.empty_cache, torch.cuda.memory.empty_cache

        @wraps(self._original)
        def counted() -> None:
            if sys._getframe(1).f_code is clear.__code__:  # hotloop's own, after memory ran out
                self._original()
                return
            self._called = True
            self.sites[user_site()] += 1
            begin = time.perf_counter()
            try:
                self._original()
            finally:
                self.seconds += time.perf_counter() - begin

        torch.cuda.empty_cache = torch.cuda.memory.empty_cache = counted
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.empty_cache, torch.cuda.memory.empty_cache = self._original, self._memory

    def step(self) -> None:
        """Note that a step has ended."""
        self.steps += 1
        self._streak = self._streak + 1 if self._called else 0
        self._called = False
        if self._streak >= self.limit and not self._warned:
            self._warned = True
            warnings.warn(str(self), MemoryWarning, stacklevel=2)

    def __str__(self) -> str:
        calls = self.sites.total()
        if not calls:
            return "torch.cuda.empty_cache() was not called"
        site, _ = self.sites.most_common(1)[0]
        return (
            f"torch.cuda.empty_cache() was called {plural(calls, 'time')} in {plural(self.steps, 'step')}: "
            f"{duration(self.seconds)} in the calls, and every step asks the device for its memory anew\n"
            f"  at {site or 'outside your own code'}\n"
            "  fix: delete the call; it frees nothing that PyTorch would not use again itself"
        )
