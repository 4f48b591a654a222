"""The memory of a simulated GPU: hears what the engine tells, allocates as PyTorch would, runs out where it would."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hotloop.simulate.allocator import Allocator, Block, Full
from hotloop.simulate.cards import Card
from hotloop.simulate.constants import Constants, constants_for
from hotloop.simulate.events import Operation, Place
from hotloop.simulate.expandable import ExpandableAllocator
from hotloop.simulate.ledger import Ledger, Timeline
from hotloop.simulate.record import Peak
from hotloop.simulate.shortage import Shortage, SimulatedOutOfMemory
from hotloop.simulate.workspaces import PROCESS, RESULT, Need, library, needs

ENDLESS = 2**60  # bytes


class Held(NamedTuple):
    """A tensor's memory."""

    block: Block
    kind: str
    module: str


class Memory:
    """A `Listener` that keeps the memory of a card.

    `cap` are the bytes that the process may reserve. With `go_on` nothing is raised: the first shortage is noted, and
    the run goes on as if the card were larger, so that one run tells both the line and how much would be needed.
    """

    def __init__(
        self,
        card: Card,
        cap: int | None = None,
        *,
        constants: Constants | None = None,
        expandable: bool = False,
        go_on: bool = False,
    ) -> None:
        self.card = card
        self.constants = constants or constants_for(card, torch.__version__)
        self.context = self.constants.context.get("base", 0)
        self.shortage: Shortage | None = None  # the first
        self._allocator = ExpandableAllocator(0, cap=cap, total=card.memory) if expandable else Allocator(0, cap=cap)
        self._go_on = go_on
        self._ledger, self._timeline = Ledger(), Timeline()
        self._held: dict[int, Held] = {}
        self._kept: dict[int, list[Held]] = {}  # reserves that live as long as a tensor, by its key
        self._once: set[str] = set()
        self._loaded: set[str] = set()
        self._operation: Operation | None = None
        self._results: list[tuple[int, int]] = []  # keys and sizes since the operation began
        self._asked = 0  # the segment that was last refused
        self._most_reserved = self._most_process = 0
        self._make_room()

    # What the engine tells

    def allocated(self, key: int, size: int, kind: str) -> None:
        self._results.append((key, size))
        if size > 0:
            self._held[key] = self._take(size, kind)

    def freed(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._give(held)
        for kept in self._kept.pop(key, ()):
            self._give(kept)

    def named(self, key: int, kind: str) -> None:
        held = self._held.get(key)
        if held is not None and held.kind != kind:
            self._ledger.rename(held.kind, kind, held.module, held.block.size)
            self._held[key] = held._replace(kind=kind)

    def before(self, operation: Operation) -> None:
        self._operation = operation
        self._results = []
        loads = library(operation)
        if loads is not None and loads not in self._loaded:
            self._loaded.add(loads)
            self.context += self.constants.context.get(loads, 0)
            self._make_room()

    def after(self, operation: Operation) -> None:
        """Libraries allocate their workspaces after the results: so the block that each gets is the right one."""
        at_once: list[Held] = []
        try:
            for need in needs(_set(operation), self.card, self.constants):
                held = self._take_need(need)
                if held is not None and need.key == "together":
                    at_once.append(held)
                elif held is not None:
                    self._give(held)
        finally:
            for held in at_once:
                self._give(held)
            self._operation = None

    def copied(self, size: int, direction: str, *, pinned: bool, blocking: bool, place: Place | None) -> None:
        """Copies take no memory of their own."""

    def waited(self, kind: str, place: Place | None) -> None:
        """Nor do waits."""

    def host(self, seconds: float) -> None:
        """Nor the host."""

    def step(self) -> None:
        """An optimizer's state appears as it is allocated."""

    # What `torch.cuda` answers

    def memory_allocated(self) -> int:
        return self._allocator.allocated

    def max_memory_allocated(self) -> int:
        return self._allocator.all.allocated.most

    def memory_reserved(self) -> int:
        return self._allocator.reserved

    def max_memory_reserved(self) -> int:
        return self._allocator.all.reserved.most

    def memory_stats(self) -> "OrderedDict[str, int]":
        return self._allocator.stats()

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes, as the driver says."""
        return max(0, self.card.usable - self.context - self._allocator.reserved), self.card.memory

    def reset_peak_memory_stats(self) -> None:
        """For the script; what is told of the run at the end is not reset."""
        self._allocator.reset_peaks()

    def reset_accumulated_memory_stats(self) -> None:
        self._allocator.reset_ever()

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
        return {**self._ledger.at_peak()[0], "context": self.context}

    @property
    def modules(self) -> dict[str, int]:
        """Bytes of activations at the peak by module, the largest first."""
        return dict(self._ledger.at_peak()[1])

    @property
    def peak_place(self) -> tuple[Place | None, str]:
        """The person's line and the module that made the peak."""
        return self._ledger.peak_place, self._ledger.peak_module

    @property
    def timeline(self) -> tuple[tuple[int, int, int], ...]:
        return self._timeline.points()

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where it is too close to say: within the table's margin of the memory."""
        if self.shortage is not None:
            return False
        return True if self._ledger.peak <= self._allocator.limit - self.constants.margin * self.card.usable else None

    def to_record(self) -> dict[str, Any]:
        """What a `Simulation` has of memory, by the names of its fields."""
        return {
            "peak": self.peak,
            "categories": self.categories,
            "modules": self.modules,
            "timeline": self.timeline,
            "fits": self.fits,
            "notes": self._notes(),
        }

    # How

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

    def _take(self, size: int, kind: str) -> Held:
        held = self._try(size, kind)
        if held is None:
            shortage = self._describe()
            self.shortage = self.shortage or shortage
            if not self._go_on:
                raise SimulatedOutOfMemory(shortage)
            self._allocator.room, self._allocator.cap = ENDLESS, None
            held = self._try(size, kind)
            assert held is not None, "there is room without end"
        return held

    def _try(self, size: int, kind: str) -> Held | None:
        try:
            block = self._allocator.allocate(size)
        except Full as full:
            self._asked = full.segment
            return None
        module = self._operation.module if self._operation else ""
        self._ledger.add(kind, module, block.size)
        self._saw()
        return Held(block, kind, module)

    def _give(self, held: Held) -> None:
        self._ledger.remove(held.kind, held.module, held.block.size)
        self._allocator.free(held.block)
        self._timeline.add(self._allocator.allocated, self._allocator.reserved)

    def _saw(self) -> None:
        allocated, reserved = self._allocator.allocated, self._allocator.reserved
        operation = self._operation
        self._ledger.saw(allocated, operation.place if operation else None, operation.module if operation else "")
        self._most_reserved = max(self._most_reserved, reserved)
        self._most_process = max(self._most_process, reserved + self.context)
        self._timeline.add(allocated, reserved)

    def _notes(self) -> tuple[str, ...]:
        """What a person should know about these figures, in sentences."""
        notes = []
        if self.shortage is not None:
            notes.append(self.shortage.words())
        elif self.fits is None:
            notes.append(f"whether it fits cannot be told: it comes within {self.constants.margin:.0%} of the memory")
        if not self.constants.calibrated:
            notes.append(f"what libraries take for themselves was not measured on {self.card.architecture} GPUs")
        return tuple(notes)

    def _describe(self) -> Shortage:
        operation = self._operation
        place = operation.place if operation and operation.place else Place("", 0)
        return Shortage(
            asked=self._asked,
            total=self.card.memory,
            free=self.mem_get_info()[0],
            allocated=self._allocator.allocated,
            reserved=self._allocator.reserved,
            context=self.context,
            cap=self._allocator.cap,
            file=place.file,
            line=place.line,
            function=place.function,
            module=operation.module if operation else "",
        )

    def _make_room(self) -> None:
        """What the context takes, tensors cannot have."""
        if self._allocator.room != ENDLESS:
            self._allocator.room = max(0, self.card.usable - self.context)


def _set(operation: Operation) -> Operation:
    """An operation with the settings that cuDNN chooses its plan by."""
    if "convolution" not in operation.name:
        return operation
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the script has set precisions by the newer names, by which the older cannot be read
        allowed = torch.backends.cudnn.conv.fp32_precision != "ieee"  # type: ignore[attr-defined]
    settings = {"allow_tf32": allowed, "benchmark": torch.backends.cudnn.benchmark}
    return replace(operation, arguments={**operation.arguments, **settings})
