"""The memory of a simulated GPU: hears what the engine tells, allocates as PyTorch would, runs out where it would."""

from collections import OrderedDict
from pathlib import PurePath
from typing import Any, NamedTuple

import torch

from hotloop.apps.simulate.allocator import Allocator, Block, Full, ignored_settings
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Listener, Operation
from hotloop.apps.simulate.families.indexing import adds_gradients
from hotloop.apps.simulate.ledger import Ledger, Timeline
from hotloop.apps.simulate.library_memory import Constants, constants_for
from hotloop.apps.simulate.need import PROCESS, RESULT, STAGE, TOGETHER, Need
from hotloop.apps.simulate.simulation_record import Band, Peak, PeakInterval
from hotloop.apps.simulate.uncertainty import Spread, too_close, verdict
from hotloop.apps.simulate.workspaces import library, needs, with_settings
from hotloop.placement.sites import user_site
from hotloop.printing.text import printable, size

_SLACK = 2**20  # by which a block may be larger than what is in it


def _said(amount: int) -> str:
    """Bytes in the way in which PyTorch writes them.

    >>> _said(2**30), _said(20 * 2**20), _said(512)
    ('1.00 GiB', '20.00 MiB', '512 bytes')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if amount >= unit:
            return f"{amount / unit:.2f} {name}"
    return f"{amount} bytes"


class Held(NamedTuple):
    """A tensor's memory."""

    block: Block
    kind: str
    module: str
    since: int  # event of the timeline


class MemoryListener(Listener):
    """A `Listener` that keeps the memory of a card."""

    def __init__(self, card: Card, *, constants: Constants | None = None) -> None:
        self.card = card
        self.constants = constants or constants_for(card, torch.__version__)
        self.context = self.constants.context.get("base", 0)
        self.shortage = ""  # where memory first ran out, in words
        self._survived = False  # whether a step was made since memory last ran out
        self._allocator = Allocator(0)
        self._settings: list[str] = []  # that the script has given the allocator
        self._ledger, self._timeline, self._spread = Ledger(), Timeline(), Spread()
        self._held: dict[int, Held] = {}
        self._kept: dict[int, list[Held]] = {}  # reserves that live as long as a tensor, by its key
        self._has_run = False  # a kernel
        self._once: set[str] = set()
        self._loaded: set[str] = set()
        self._operation: Operation | None = None
        self._results: list[tuple[int, int]] = []  # keys and sizes since the operation began
        self._needs: list[Need] = []  # of the operation, that are still to be taken
        self._at_once: list[Held] = []  # what it holds until it has run
        self._sum: tuple[int, int, str] | None = None  # of gradients, whose memory is not known yet
        self._asked = 0  # the segment that was last refused
        self._most_reserved = self._most_process = 0
        self._make_room()

    # What the engine tells

    def allocated(self, key: int, size: int, kind: str) -> None:
        self._settle()
        self._take_needs(len(self._results))
        self._results.append((key, size))
        if size > 0 and adds_gradients(self._operation):
            self._sum = key, size, kind
        elif size > 0:
            self._held[key] = self._take(size, kind)

    def freed(self, key: int) -> None:
        if self._sum is not None and self._inherits(key, *self._sum):
            self._sum = None
            return
        held = self._held.pop(key, None)
        if held is not None:
            self._give(held)
        for kept in self._kept.pop(key, ()):
            self._give(kept)

    def named(self, key: int, kind: str) -> None:
        self._settle()
        held = self._held.get(key)
        if held is not None and held.kind != kind:
            self._ledger.rename(held.kind, kind, held.module, held.block.size)
            self._timeline.rename(held.kind, kind, held.block.size, held.since)
            self._held[key] = held._replace(kind=kind)

    def before(self, operation: Operation) -> None:
        self._settle()
        self._end_operation()  # one that ran out of memory has not ended
        self._operation = operation
        self._results = []
        self._needs = [*needs(with_settings(operation), self.card, self.constants)]
        loads = library(operation)
        if loads is not None and loads not in self._loaded:
            self._loaded.add(loads)
            self.context += self.constants.context.get(loads, 0)
            self._make_room()

    def after(self, operation: Operation) -> None:
        """Most libraries allocate their workspaces after the results: so the block that each gets is the right one."""
        try:
            self._take_needs(None)
        finally:
            self._end_operation()
            if not self._has_run:
                self._has_run = True
                self._allocator.addresses.kernels_loaded()

    def step(self) -> None:
        self._settle()
        self._survived = True
        self._timeline.end_step()

    # What `torch.cuda` answers

    def memory_stats(self) -> "OrderedDict[str, int]":
        return self._allocator.stats()

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes, as the driver says."""
        return max(0, self.card.memory - self.context - self._allocator.reserved), self.card.memory

    def reset_peak_memory_stats(self) -> None:
        """For the script; what is told of the run at the end is not reset."""
        self._allocator.reset_peaks()

    def reset_accumulated_memory_stats(self) -> None:
        self._allocator.reset_ever()

    def set_allocator_settings(self, words: str) -> None:
        """A note will say that they are not obeyed."""
        self._settings.append(words)

    def empty_cache(self) -> None:
        self._allocator.empty_cache()

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self._allocator.cap = int(fraction * self.card.memory)

    # What is told at the end

    @property
    def peak(self) -> Peak:
        return Peak(self._ledger.peak, self._most_reserved, self._most_process)

    @property
    def categories(self) -> dict[str, int]:
        """Bytes at the peak of what is allocated, and the context; those of blocks add up to the peak."""
        return {**self._timeline.at_peak(), "context": self.context}

    @property
    def modules(self) -> dict[str, int]:
        """Bytes of activations at the peak by module, the largest first."""
        return dict(self._ledger.modules_at_peak())

    @property
    def interval(self) -> PeakInterval:
        """Between which nine of ten such peaks lie."""
        return self._spread.interval(self.peak)

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where it is too close to say.

        One that ran out does not say how much it would have needed; one that the script caught, and made a step after,
        does fit.
        """
        if self.shortage:
            return self._survived
        return verdict(self.interval, self._allocator.limit, self.constants.margin)

    def to_record(self) -> dict[str, Any]:
        """What a `Simulation` has of memory, by the names of its fields."""
        return {
            "gpu_name": self.card.name,
            "gpu_memory": self.card.memory,
            "peak": self.peak,
            "interval": self.interval,
            "peak_at": self._ledger.peak_at(),
            "categories": self.categories,
            "modules": self.modules,
            "timeline": self._timeline.points(),
            "bands": tuple(Band(*band) for band in self._timeline.bands().items()),
            "step_ends": tuple(self._timeline.step_ends),
            "fits": self.fits,
            "notes": self._notes(),
        }

    # How

    def _inherits(self, key: int, heir: int, size: int, kind: str) -> bool:
        """Whether what goes now gives its memory to the sum that was just made: autograd adds to it in place."""
        if key == heir:
            return True
        held = self._held.get(key)
        if held is None or key in self._kept or not size <= held.block.size < size + _SLACK:
            return False
        self._held[heir] = self._held.pop(key)
        self._sum = None
        self.named(heir, kind)
        return True

    def _settle(self) -> None:
        """A sum into which nothing went has memory of its own."""
        if self._sum is not None:
            (key, size, kind), self._sum = self._sum, None
            self._held[key] = self._take(size, kind)

    def _end_operation(self) -> None:
        """Give back what the operation held, the last first, as it goes out of scope."""
        self._give_back(0)
        self._operation = None

    def _give_back(self, number: int) -> None:
        """Give back what the operation holds, but for the first so many."""
        while len(self._at_once) > number:
            self._give(self._at_once.pop())

    def _take_needs(self, ahead: int | None) -> None:
        """Take what the operation needs before the result of a number, or after all of them."""
        now = [need for need in self._needs if ahead is None or need.ahead == ahead]
        self._needs = [need for need in self._needs if need not in now]
        before = len(self._at_once)
        for need in now:
            held = self._take_need(need) if need.high is None else self._take_in_doubt(need)
            if held is not None and need.key in (TOGETHER, STAGE):
                self._at_once.append(held)
            elif held is not None:
                self._give(held)
        if any(need.key == STAGE for need in now):
            self._give_back(before)

    def _take_in_doubt(self, need: Need) -> Held | None:
        """Take what may be more or less than is known, which is told to those who ask how sure the peak is."""
        self._spread.hold(need, self._operation, self._allocator.allocated)
        try:
            if need.bytes > 0:
                return self._take_need(need)
            self._spread.saw(self._allocator.allocated)
            return None
        finally:
            self._spread.release(need)

    def _take_need(self, need: Need) -> Held | None:
        """Take what an operation needs; None where it stays, or there was no room and it makes do without."""
        if need.lasting == PROCESS:
            if need.key not in self._once:
                self._take(need.bytes, "workspace")
                self._once.add(need.key)
            return None
        if need.least is None:
            held = self._take(need.bytes, "workspace")
        else:
            found = self._try(need.bytes, "workspace")
            if found is None:
                return self._take(need.least, "workspace") if need.least else None
            held = found
        if need.lasting == RESULT and self._results:
            # The operation's own handle of a reserve has no bytes here; else what it saved last goes last.
            key = next((key for key, size in self._results if size == 0), self._results[-1][0])
            self._kept.setdefault(key, []).append(held)
            return None
        return held

    def _take(self, amount: int, kind: str) -> Held:
        held = self._try(amount, kind)
        if held is not None:
            return held
        place = (self._operation and self._operation.place) or user_site()  # `torch.empty` is no operation
        where = f" at {printable(PurePath(place.file).name)}:{place.line}" if place else ""
        free = min(self.mem_get_info()[0], max(0, self._allocator.limit - self._allocator.reserved))
        shortage = f"memory runs out{where}: {size(self._asked)} are asked for where {size(free)} can be had"
        self.shortage = self.shortage or shortage
        self._survived = False
        raise torch.OutOfMemoryError(self._error())

    def _error(self) -> str:
        """In the words of PyTorch, since scripts read them."""
        allocated, reserved = self._allocator.allocated, self._allocator.reserved
        free, total = map(_said, self.mem_get_info())
        allowed = "" if self._allocator.cap is None else f"{_said(self._allocator.cap)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {_said(self._asked)}. GPU 0 has a total capacity of {total}"
            f" of which {free} is free. Including non-PyTorch memory, this process has"
            f" {_said(reserved + self.context)} memory in use. {allowed}Of the allocated memory {_said(allocated)}"
            f" is allocated by PyTorch, and"
            f" {_said(reserved - allocated)} is reserved by PyTorch but unallocated. (simulated)"
        )

    def _try(self, size: int, kind: str) -> Held | None:
        try:
            block = self._allocator.allocate(size)
        except Full as full:
            self._asked = full.segment
            return None
        module = self._operation.module if self._operation else ""
        self._ledger.add(kind, module, block.size)
        self._saw()
        return Held(block, kind, module, self._timeline.events)

    def _give(self, held: Held) -> None:
        self._ledger.remove(held.kind, held.module, held.block.size)
        self._allocator.free(held.block)
        self._timeline.add(self._allocator.allocated, self._allocator.reserved, self._ledger.now)

    def _saw(self) -> None:
        allocated, reserved = self._allocator.allocated, self._allocator.reserved
        self._ledger.saw(allocated, self._operation)
        self._spread.saw(allocated)
        self._most_reserved = max(self._most_reserved, reserved)
        self._most_process = max(self._most_process, reserved + self.context)
        self._timeline.add(allocated, reserved, self._ledger.now)

    def _notes(self) -> tuple[str, ...]:
        """What a person should know about these figures, in sentences."""
        notes = []
        if self.shortage:
            notes.append(self.shortage + (", and the script went on" if self.fits else ""))
        interval = self.interval
        if self.fits is None:
            notes.append(too_close(interval, self._allocator.limit))
        notes += interval.reasons
        if ignored := ignored_settings(*self._settings):
            notes.append(f"these settings of the CUDA allocator are not simulated: {', '.join(ignored)}")
        if not self.constants.calibrated:
            notes.append(f"what libraries take for themselves was not measured on {self.card.architecture} GPUs")
        return tuple(notes)

    def _make_room(self) -> None:
        """What the context takes, tensors cannot have."""
        self._ledger.now["context"] = self.context
        self._allocator.room = max(0, self.card.memory - self.context)
