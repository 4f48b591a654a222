"""`Rewind`: what a pass changes besides gradients, noted before it and put back when it fails."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FIRST_LOOKS = 4  # passes at the start that are all looked at
LOOK_EVERY = 257  # later passes; odd, so that each of two turns has its looks


@dataclass(frozen=True)
class _Dice:
    """A generator of random numbers."""

    get: Callable[[], Any]
    put: Callable[[Any], None]
    is_same: Callable[[Any, Any], bool]


class Rewind:
    """The random states and the buffers of modules as they were before a pass.

    To note all of them before every pass would cost more than a small network takes. So a few passes are looked at
    closely, the first ones and one in many later, and only what they were seen to change is noted in the others.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._modules = modules
        self._dice = list(_dice_of(device))
        self._cast: list[_Dice] = []  # those that passes were seen to use
        self._written: list[Tensor] = []  # buffers that passes were seen to write to
        self._copies: list[Tensor] = []  # what they held before the pass
        self._replaced = False  # whether a pass was seen to put another tensor in place of a buffer
        self._passes = 0
        self._looking = False
        self._states: list[tuple[_Dice, Any]] = []
        self._there: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._versions: list[int | None] = []

    def note(self) -> None:
        """Before a pass."""
        self._looking = self._passes < FIRST_LOOKS or self._passes % LOOK_EVERY == 0
        self._passes += 1
        if self._looking:
            self._look()
            return
        if self._cast:
            self._states = [(dice, dice.get()) for dice in self._cast]
        if self._written:
            torch._foreach_copy_(self._copies, self._written)
        if self._replaced:
            self._there = self._tables()

    def settle(self) -> None:
        """After a pass that went well."""
        if self._looking:
            self._looking = False
            self._learn()

    def put(self) -> None:
        """After a pass that failed: everything as it was noted."""
        for dice, state in self._states:
            dice.put(state)
        for table, before in self._there:
            table.clear()
            table.update(before)
        with torch.no_grad():
            for buffer, copy in zip(self._written, self._copies, strict=True):
                buffer.copy_(copy)
        if self._looking:
            self._passes -= 1  # what it would have shown is still to be seen
        self._looking = False

    def _look(self) -> None:
        """Note everything."""
        tables = self._tables()
        buffers = list({id(b): b for table, _ in tables for b in table.values() if _is_plain(b)}.values())
        copies = [buffer.detach().clone() for buffer in buffers]  # the one line that may fail for want of memory
        self._there, self._written, self._copies = tables, buffers, copies
        self._versions = [_writes(buffer) for buffer in buffers]
        self._states = [(dice, dice.get()) for dice in self._dice]

    def _learn(self) -> None:
        """See what the pass has changed, and note only that from now on."""
        used = [dice for dice, state in self._states if not dice.is_same(state, dice.get())]
        self._cast = [dice for dice in self._dice if dice in used or dice in self._cast]
        self._replaced = self._replaced or any(
            table.keys() != before.keys() or any(table[name] is not before[name] for name in before)
            for table, before in self._there
        )
        kept = [
            (buffer, copy)
            for buffer, copy, version in zip(self._written, self._copies, self._versions, strict=True)
            if version is None or _writes(buffer) != version
        ]
        if self._replaced:
            now = {id(b) for table, _ in self._there for b in table.values() if b is not None}
            kept = [(buffer, copy) for buffer, copy in kept if id(buffer) in now]
        self._written = [buffer for buffer, _ in kept]
        self._copies = [copy for _, copy in kept]
        self._states, self._versions = [], []
        if not self._replaced:
            self._there = []

    def _tables(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Which tensors are buffers now; the tables themselves and copies of them."""
        tables = (m._buffers for module in self._modules for m in module.modules() if m._buffers)
        return [(table, dict(table)) for table in tables]


def _dice_of(device: torch.device) -> Iterable[_Dice]:
    yield _Dice(torch.get_rng_state, torch.set_rng_state, torch.equal)
    if device.type == "cuda":
        yield _Dice(
            lambda: torch.cuda.get_rng_state(device), lambda s: torch.cuda.set_rng_state(s, device), torch.equal
        )
    elif device.type == "mps":
        yield _Dice(torch.mps.get_rng_state, torch.mps.set_rng_state, torch.equal)
    yield _Dice(random.getstate, random.setstate, lambda a, b: a == b)
    yield _Dice(_numpy_state, np.random.set_state, lambda a, b: a[2:] == b[2:] and np.array_equal(a[1], b[1]))


def _numpy_state() -> Any:
    return np.random.get_state()  # of the generator that people's code uses without naming one


def _is_plain(buffer: Any) -> bool:
    return isinstance(buffer, Tensor) and not buffer.is_meta and buffer.layout == torch.strided


def _writes(buffer: Tensor) -> int | None:
    """How often a tensor was written; None for an inference tensor, which does not count."""
    return None if buffer.is_inference() else buffer._version
