"""`Rewind`: what a pass changes besides gradients, noted before it and put back when it fails."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotloop.dice import Dice, all_dice, same
from hotloop.memory.oom import surely

FIRST_LOOKS = 4  # passes at the start that are all looked at
LOOK_EVERY = 257  # later passes; odd, so that each of two turns has its looks
SMALL = 2**16  # numbers in a tensor whose copy costs next to nothing


class Rewind:
    """The random states and the buffers of modules as they were before a pass.

    To note all of them before every pass would cost more than a small network takes. So a few passes are looked at
    closely, the first ones and one in many later, and only what they were seen to change is noted in the others.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._modules = modules
        self._device = device
        self._dice = list(all_dice(device).values())
        self._cast: list[Dice] = []  # those that passes were seen to use
        self._written: list[tuple[list[Tensor], list[Tensor]]] = []  # what passes were seen to write to, and copies
        self._changing: list[dict[str, Any]] = []  # tables in which passes were seen to put other tensors
        self._passes = 0
        self.quiet = 0  # passes to come before which there is nothing to note
        self._looking = False
        self._states: list[tuple[Dice, Any]] = []
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []  # what they held before the pass
        self._held: list[tuple[Tensor, Tensor, int | None]] = []  # tensors in those, their copies and versions

    def look_again(self) -> None:
        """Look closely at the next passes: they may change what earlier ones did not."""
        self._passes = self.quiet = 0

    def note(self) -> None:
        """Before a pass."""
        self._looking = self._passes < FIRST_LOOKS or self._passes % LOOK_EVERY == 0
        self._passes += 1
        if self._looking:
            self._dice += [dice for dice in self._own_dice() if dice not in self._dice]
            self._hold(self._own_tables())
            self._states = [(dice, dice.take()) for dice in self._dice]
            return
        if self._cast:
            self._states = [(dice, dice.take()) for dice in self._cast]
        for tensors, copies in self._written:
            torch._foreach_copy_(copies, tensors)
        if self._changing:
            self._hold(self._changing)

    def settle(self) -> None:
        """After a pass that went well."""
        if self._looking:
            self._looking = False
            self._learn()
            if self._passes >= FIRST_LOOKS and not (self._cast or self._written or self._changing):
                self.quiet = -self._passes % LOOK_EVERY
                self._passes += self.quiet  # as if they had been noted

    def put(self) -> None:
        """After a pass that failed: everything as it was noted."""
        for dice, state in self._states:
            dice.put(state)
        for table, before in self._tables:
            table.clear()
            table.update(before)
        with torch.no_grad():
            for tensor, copy, _ in self._held:
                tensor.copy_(copy)
            if not self._looking:  # else everything is held, and these copies are of an earlier pass
                for tensors, copies in self._written:
                    torch._foreach_copy_(tensors, copies)
        if self._looking:
            self._passes -= 1  # what it would have shown is still to be seen
        self._looking = False

    def _hold(self, tables: Iterable[dict[str, Any]]) -> None:
        """Note what tables hold, and the values of the tensors among it."""
        noted = [(table, dict(table)) for table in tables]
        tensors = {id(b): b for _, before in noted for b in before.values() if _is_plain(b)}.values()
        copies = surely(lambda: [tensor.detach().clone() for tensor in tensors], self._device)
        self._held = [(t, copy, _writes(t)) for t, copy in zip(tensors, copies, strict=True)]
        self._tables = noted

    def _learn(self) -> None:
        """See what the pass has changed, and note only that from now on."""
        used = [dice for dice, state in self._states if not same(state, dice.take())]
        self._cast = [dice for dice in self._dice if dice in used or dice in self._cast]
        known = {id(table) for table in self._changing}
        self._changing = [t for t, before in self._tables if id(t) in known or _is_other(t, before)]
        known = {id(table) for table in self._changing}
        covered = {id(v) for table, before in self._tables if id(table) in known for v in before.values()}
        written = {id(tensor) for tensors, _ in self._written for tensor in tensors}
        written |= {id(tensor) for tensor, copy, version in self._held if _may_be_written(tensor, copy, version)}
        for _, before in self._tables:
            if not written.isdisjoint(map(id, before.values())):  # a module that writes to one may write to all
                written.update(map(id, before.values()))
        kept = [(tensor, copy) for tensor, copy, _ in self._held if id(tensor) in written - covered]
        alike = {t.dtype: [pair for pair in kept if pair[0].dtype == t.dtype] for t, _ in kept}  # copied in one kernel
        self._written = [([t for t, _ in pairs], [copy for _, copy in pairs]) for pairs in alike.values()]
        self._states, self._tables, self._held = [], [], []

    def _own_tables(self) -> Iterator[dict[str, Any]]:
        """Where modules keep their buffers."""
        return (inner._buffers for inner in self._inner() if inner._buffers)

    def _own_dice(self) -> Iterator[Dice]:
        """Generators that modules have for themselves."""
        for inner in self._inner():
            for value in vars(inner).values():
                if isinstance(value, torch.Generator):
                    yield Dice.of(value)

    def _inner(self) -> Iterable[nn.Module]:
        return dict.fromkeys(inner for module in self._modules for inner in module.modules())


def _is_plain(buffer: Any) -> bool:
    return isinstance(buffer, Tensor) and buffer.layout == torch.strided and not buffer.is_meta and not is_lazy(buffer)


def _is_other(table: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether other tensors are in a table than before, whatever their values."""
    return table.keys() != before.keys() or any(table[name] is not tensor for name, tensor in before.items())


def _may_be_written(tensor: Tensor, copy: Tensor, version: int | None) -> bool:
    """Whether a pass has written to a tensor, or may have: kernels such as those of BatchNorm do not count it.

    Values on a device cannot be compared without a wait, so what is small there is taken to be written.
    """
    if version is None or _writes(tensor) != version:
        return True
    if tensor.device.type == "cpu":
        return not torch.equal(tensor, copy)
    return tensor.is_floating_point() and tensor.numel() <= SMALL


def _writes(tensor: Tensor) -> int | None:
    """How often a tensor was written; None for an inference tensor, which does not count."""
    return None if tensor.is_inference() else tensor._version
