"""PyTorch's caching allocator of CUDA memory, to the byte: rounding, pools, best fit, splits, merges, running out."""

import os
import re
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

ROUNDING = 512  # every request is rounded up to this
SMALL = 2**20  # requests up to this share segments of 2 MiB
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20  # for requests below 10 MiB; larger ones get a segment of their own
OWN_SEGMENT = 10 * 2**20
GRAIN = 2 * 2**20  # of a segment
RANGE = 32 * 2**20  # of addresses that the driver takes at once
FIRST_RANGE = 414 * 2**20  # of addresses that it holds at the top until the first kernel is loaded
TOP = 0x7F00_0000_0000
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts, as PyTorch has it
_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)")


def ignored_settings(*given: str) -> tuple[str, ...]:
    """What `PYTORCH_CUDA_ALLOC_CONF`, and words that scripts give later, ask for and is not simulated.

    >>> ignored_settings("expandable_segments:False,max_split_size_mb:128", "backend:native")
    ('max_split_size_mb:128',)
    """
    environment = next((os.environ[name] for name in NAMES if os.environ.get(name)), "")
    found = [f"{name}:{value.strip()}" for words in (environment, *given) for name, value in _SETTING.findall(words)]
    usual = ("backend:native", "expandable_segments:False")
    return tuple(each for each in dict.fromkeys(found) if each not in usual and not each.startswith("pinned_"))


class Addresses:
    """Where CUDA's driver puts segments, as it was seen to: between free blocks of one size, addresses decide.

    They go down, range by range; what a range has left is filled first.
    """

    def __init__(self) -> None:
        self._end = TOP - FIRST_RANGE
        self._gaps: list[tuple[int, int]] = []  # addresses and sizes that ranges have left

    def place(self, size: int) -> int:
        """Where the next segment goes."""
        need = -(-size // GRAIN) * GRAIN
        gap = next((gap for gap in reversed(self._gaps) if gap[1] >= need), None)
        if gap is None:
            length = -(-need // RANGE) * RANGE
            self._end -= length
            gap = self._end, length
        else:
            self._gaps.remove(gap)
        if gap[1] > need:
            self._gaps.append((gap[0] + need, gap[1] - need))
        return gap[0]

    def kernels_loaded(self) -> None:
        """The first kernel has run: what the driver held at the top until then can have segments."""
        self._gaps.append((TOP - FIRST_RANGE, FIRST_RANGE))


class Gauge:
    """Bytes, and the pieces that they come in: now, at most, and ever."""

    __slots__ = ("bytes", "count", "gained", "lost", "lost_pieces", "most", "most_count", "pieces")

    def __init__(self) -> None:
        self.bytes = self.most = self.gained = self.lost = 0
        self.count = self.most_count = self.pieces = self.lost_pieces = 0

    def up(self, size: int) -> None:
        self.bytes += size
        self.gained += size
        self.count += 1
        self.pieces += 1
        if self.bytes > self.most:  # noqa: PLR1730  # a call of `max` in each event would be felt
            self.most = self.bytes
        if self.count > self.most_count:  # noqa: PLR1730
            self.most_count = self.count

    def down(self, size: int) -> None:
        self.bytes -= size
        self.lost += size
        self.count -= 1
        self.lost_pieces += 1

    def reset_peak(self) -> None:
        self.most, self.most_count = self.bytes, self.count

    def reset_ever(self) -> None:
        """Forget what came and went before."""
        self.gained = self.lost = self.pieces = self.lost_pieces = 0


@dataclass
class Tally:
    """What an allocator has given out, and holds."""

    allocated: Gauge = field(default_factory=Gauge)
    requested: Gauge = field(default_factory=Gauge)
    reserved: Gauge = field(default_factory=Gauge)
    inactive: Gauge = field(default_factory=Gauge)  # free, and part of a segment that is in use

    @property
    def gauges(self) -> tuple[Gauge, ...]:
        return self.allocated, self.requested, self.reserved, self.inactive

    def stats(self) -> dict[str, int]:
        """By the names of `torch.cuda.memory_stats`, of both pools together; with one stream, allocated is active."""
        found: dict[str, int] = {}
        for gauge, amount, number in (
            (self.allocated, "allocated_bytes", "allocation"),
            (self.allocated, "active_bytes", "active"),
            (self.requested, "requested_bytes", ""),
            (self.reserved, "reserved_bytes", "segment"),
            (self.inactive, "inactive_split_bytes", "inactive_split"),
        ):
            found |= _four(f"{amount}.all", gauge.bytes, gauge.most, gauge.gained, gauge.lost)
            if number:
                found |= _four(f"{number}.all", gauge.count, gauge.most_count, gauge.pieces, gauge.lost_pieces)
        return found


def _four(name: str, now: int, most: int, gained: int, lost: int) -> dict[str, int]:
    return {f"{name}.current": now, f"{name}.peak": most, f"{name}.allocated": gained, f"{name}.freed": lost}


class Full(Exception):
    """No segment can be had, even after all cached ones were released."""

    def __init__(self, asked: int, segment: int) -> None:
        super().__init__(f"no room for {asked} bytes")
        self.asked = asked
        self.segment = segment  # what the driver was asked for


class Block:
    """A piece of a segment, in use or free; its neighbours in the segment are known."""

    __slots__ = ("address", "after", "before", "in_use", "pool", "requested", "size")

    def __init__(self, pool: "Pool", address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.requested = 0
        self.in_use = False
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def split(self) -> bool:
        """Whether it is only a part of its segment, which therefore cannot be released."""
        return self.before is not None or self.after is not None


class Pool:
    """The free blocks, small or large, in the order of best fit."""

    __slots__ = ("blocks", "free")

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []  # (size, address), sorted
        self.blocks: dict[int, Block] = {}  # the same, by address

    def put(self, block: Block) -> None:
        insort(self.free, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.blocks[block.address]

    def best(self, size: int) -> Block | None:
        """The smallest free block that is large enough, of several the one with the lowest address; not removed."""
        place = bisect_left(self.free, (size, 0))
        return self.blocks[self.free[place][1]] if place < len(self.free) else None


def rounded(size: int) -> int:
    """What a request takes at least.

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)
    """
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


def segment_for(size: int) -> int:
    """The segment that is asked of the driver for a rounded request.

    >>> [segment_for(mib * 2**20) >> 20 for mib in (1, 2, 9, 10, 11)]
    [2, 20, 20, 10, 12]
    """
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // GRAIN) * GRAIN


class Allocator:
    """Hands out blocks as PyTorch would on a device with `room` bytes for this process.

    `cap` is the most that may be reserved (`torch.cuda.set_per_process_memory_fraction`); `addresses` says where the
    driver puts a segment of a size, where that is known.
    """

    def __init__(self, room: int, *, cap: int | None = None, addresses: Callable[[int], int] | None = None) -> None:
        self.room = room
        self.cap = cap
        self.all = Tally()
        self.small, self.large = Pool(), Pool()
        self.retries = self.failures = self.segments_made = self.segments_released = self.waits = 0
        self.addresses = Addresses()
        self._place = addresses or self.addresses.place

    @property
    def allocated(self) -> int:
        return self.all.allocated.bytes

    @property
    def reserved(self) -> int:
        return self.all.reserved.bytes

    @property
    def limit(self) -> int:
        """The most that can be reserved."""
        return self.room if self.cap is None else min(self.room, self.cap)

    def allocate(self, size: int) -> Block:
        """A block for `size` bytes, at least one; raises `Full` where there is no room for it."""
        need = rounded(size)
        small = need <= SMALL
        pool = self.small if small else self.large
        block = pool.best(need)
        if block is None:
            block = self._new(pool, need)
        else:
            pool.remove(block)
        if block.split:
            self.all.inactive.down(block.size)
        rest = block.size - need
        if rest > SMALL or (small and rest >= ROUNDING):
            self._split(block, need)
        block.in_use = True
        block.requested = size
        self.all.allocated.up(block.size)
        self.all.requested.up(size)
        return block

    def free(self, block: Block) -> None:
        """Give a block back: it joins its free neighbours and can be handed out again."""
        pool = block.pool
        self.all.allocated.down(block.size)
        self.all.requested.down(block.requested)
        block.in_use = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.in_use:
                self.all.inactive.down(neighbour.size)
                pool.remove(neighbour)
                _join(block, neighbour)
        pool.put(block)
        if block.split:
            self.all.inactive.up(block.size)

    def empty_cache(self) -> None:
        """Give every segment back to the driver of which no part is in use, after a wait for the device."""
        self.waits += 1
        for pool in (self.large, self.small):
            for block in [block for block in pool.blocks.values() if not block.split]:
                pool.remove(block)
                self.segments_released += 1
                self.all.reserved.down(block.size)

    def could_allocate(self, size: int) -> bool:
        """Whether a request can be met without releasing anything."""
        need = rounded(size)
        held = self.small if need <= SMALL else self.large
        return held.best(need) is not None or self.reserved + segment_for(need) <= self.limit

    def reset_peaks(self) -> None:
        for gauge in self.all.gauges:
            gauge.reset_peak()

    def reset_ever(self) -> None:
        self.retries = self.failures = 0
        for gauge in self.all.gauges:
            gauge.reset_ever()

    def stats(self) -> "OrderedDict[str, int]":
        """The same as `torch.cuda.memory_stats()`, but for the pools one by one."""
        counts = {
            "num_alloc_retries": self.retries,
            "num_ooms": self.failures,
            "num_device_alloc": self.segments_made,
            "num_device_free": self.segments_released,
            "num_sync_all_streams": self.waits,
        }
        return OrderedDict(sorted({**counts, **self.all.stats()}.items()))

    def _new(self, pool: Pool, need: int) -> Block:
        """A block in a new segment; where there is no room for one, after a release of what is cached."""
        block = self._grow(pool, need)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, need)
        if block is None:
            self.failures += 1
            raise Full(need, segment_for(need))
        return block

    def _grow(self, pool: Pool, need: int) -> Block | None:
        size = segment_for(need)
        if self.reserved + size > self.limit:
            return None
        self.segments_made += 1
        self.all.reserved.up(size)
        return Block(pool, self._place(size), size)

    def _split(self, block: Block, need: int) -> None:
        """Keep the front of a block and leave the rest free."""
        rest = Block(block.pool, block.address + need, block.size - need)
        block.size = need
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        block.pool.put(rest)
        self.all.inactive.up(rest.size)


def _join(block: Block, neighbour: Block) -> None:
    """Make a block as large as itself and a free neighbour, which is no more."""
    if neighbour is block.before:
        block.address = neighbour.address
        block.before = neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
    block.size += neighbour.size
