"""The caching allocator with `expandable_segments:True`: one range of addresses per pool, mapped to memory in pages."""

from bisect import bisect_left, insort

from hotloop.apps.simulate.allocator import (
    LARGE_SEGMENT,
    ROUNDING,
    SMALL_SEGMENT,
    Allocator,
    Block,
    Pool,
    join,
    segment_for,
)


class ExpandableAllocator(Allocator):
    """As `Allocator`, but a segment grows at its end and gives back any page of which nothing is in use."""

    def __init__(self, room: int, *, cap: int | None = None, total: int | None = None) -> None:
        super().__init__(room, cap=cap)
        self._range = (total or room) * 9 // 8 // LARGE_SEGMENT * LARGE_SEGMENT + LARGE_SEGMENT
        self._unmapped: dict[Pool, list[Block]] = {}  # addresses without memory, in their order

    def _cached(self, pool: Pool, need: int) -> Block | None:
        """Best fit, where a block at the end of a segment counts as large as it could grow."""
        place = bisect_left(pool.free, (need, 0))
        if place == len(pool.free):
            return None
        block = pool.blocks[pool.free[place][1]]
        for _, address in pool.free[place + 1 :]:
            larger = pool.blocks[address]
            if _could_grow(larger) >= _could_grow(block):
                break
            block = larger
        pool.remove(block)
        return block

    def _grow(self, pool: Pool, need: int) -> Block | None:
        if self.cap is not None and self.reserved + segment_for(need) > self.cap:
            return None
        block = self._candidate(pool, need)
        if not block.mapped and not self._map(pool, block, min(block.size, need)):
            return None
        while block.size < need:
            after = block.after
            assert after is not None, "a candidate has room for the whole request"
            if not self._map(pool, after, min(need - block.size, after.size)):
                return None
            block = after  # it has joined the block before it
        pool.remove(block)
        return block

    def _candidate(self, pool: Pool, need: int) -> Block:
        """The first block, free or without memory, with enough addresses from there on that nobody uses."""
        unmapped = self._unmapped.setdefault(pool, [])
        for block in unmapped:
            first = block if block.before is None or block.before.in_use else block.before
            if _addresses_from(first, need):
                return first
        length = max(self._range, -(-need // LARGE_SEGMENT) * LARGE_SEGMENT)
        start = self.addresses.place(length + LARGE_SEGMENT)
        block = Block(pool, -(-start // LARGE_SEGMENT) * LARGE_SEGMENT, length)  # pages count from address 0
        block.mapped = False
        insort(unmapped, block, key=_address)
        return block

    def _map(self, pool: Pool, block: Block, size: int) -> bool:
        """Give memory to the beginning of a range of addresses, which then joins its free neighbours."""
        page = _page(pool)
        size = min(-(-size // page) * page, block.size)
        if self.reserved + size > self.room:
            return False
        self._forget(pool, block)
        if size < block.size:
            rest = Block(pool, block.address + size, block.size - size)
            rest.mapped = False
            _splice(rest, block, block.after)
            insort(self._unmapped[pool], rest, key=_address)
            block.size = size
        block.mapped = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.mapped and not neighbour.in_use:
                pool.remove(neighbour)
                join(block, neighbour)
        pool.put(block)
        self._reserve(pool, size)
        return True

    def _release(self, pool: Pool) -> None:
        for block in list(pool.blocks.values()):
            self._unmap(pool, block)

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Give back the whole pages of a free block."""
        page = _page(pool)
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            front = Block(pool, block.address, start - block.address)
            _splice(front, block.before, block)
            pool.put(front)
        if end < block.address + block.size:
            back = Block(pool, end, block.address + block.size - end)
            _splice(back, block, block.after)
            pool.put(back)
        block.address, block.size, block.mapped = start, end - start, False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.mapped:
                self._forget(pool, neighbour)
                join(block, neighbour)
        if block.split:
            insort(self._unmapped[pool], block, key=_address)
        self._unreserve(pool, end - start)

    def _forget(self, pool: Pool, block: Block) -> None:
        unmapped = self._unmapped[pool]
        del unmapped[bisect_left(unmapped, block.address, key=_address)]

    def _splits(self, block: Block, need: int) -> bool:
        return block.size - need >= ROUNDING

    def _count(self, block: Block) -> None:
        """PyTorch does not count these where segments expand: their pages can be released."""

    def _uncount(self, block: Block) -> None:
        """The same."""


def _address(block: Block) -> int:
    return block.address


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT if pool.small else LARGE_SEGMENT


def _could_grow(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _addresses_from(block: Block | None, need: int) -> bool:
    found = 0
    while found < need and block is not None and not block.in_use:
        found += block.size
        block = block.after
    return found >= need


def _splice(block: Block, before: Block | None, after: Block | None) -> None:
    """Put a block between two neighbours."""
    block.before, block.after = before, after
    if before is not None:
        before.after = block
    if after is not None:
        after.before = block
