"""What PyTorch's allocator counts about itself, under the names that `torch.cuda.memory_stats` gives."""

from collections import OrderedDict


class Gauge:
    """Bytes, and the pieces that they come in: now, at most, and ever. What a pool gains, the whole gains."""

    __slots__ = ("bytes", "count", "gained", "lost", "lost_pieces", "most", "most_count", "pieces", "whole")

    def __init__(self, whole: "Gauge | None" = None) -> None:
        self.bytes = self.most = self.gained = self.lost = 0
        self.count = self.most_count = self.pieces = self.lost_pieces = 0
        self.whole = whole

    def up(self, size: int) -> None:
        gauge: Gauge | None = self
        while gauge is not None:
            gauge.bytes += size
            gauge.gained += size
            gauge.count += 1
            gauge.pieces += 1
            if gauge.bytes > gauge.most:  # noqa: PLR1730  # a call of `max` in each event would be felt
                gauge.most = gauge.bytes
            if gauge.count > gauge.most_count:  # noqa: PLR1730
                gauge.most_count = gauge.count
            gauge = gauge.whole

    def down(self, size: int) -> None:
        gauge: Gauge | None = self
        while gauge is not None:
            gauge.bytes -= size
            gauge.lost += size
            gauge.count -= 1
            gauge.lost_pieces += 1
            gauge = gauge.whole

    def reset_peak(self) -> None:
        self.most, self.most_count = self.bytes, self.count

    def reset_ever(self) -> None:
        """Forget what came and went before."""
        self.gained = self.lost = self.pieces = self.lost_pieces = 0


class Tally:
    """The gauges of one pool, or of all together."""

    __slots__ = ("active", "allocated", "inactive", "requested", "reserved")

    def __init__(self, whole: "Tally | None" = None) -> None:
        wholes: tuple[Gauge | None, ...] = whole.gauges() if whole is not None else (None,) * 5
        made = [Gauge(each) for each in wholes]
        self.allocated, self.active, self.requested, self.reserved = made[:4]
        self.inactive = made[4]  # free, and part of a segment that is in use

    def gauges(self) -> tuple[Gauge, ...]:
        return self.allocated, self.active, self.requested, self.reserved, self.inactive


_NAMES = {  # gauge → its bytes and its pieces, as PyTorch calls them
    "allocated": ("allocated_bytes", "allocation"),
    "active": ("active_bytes", "active"),
    "requested": ("requested_bytes", None),
    "reserved": ("reserved_bytes", "segment"),
    "inactive": ("inactive_split_bytes", "inactive_split"),
}


def stats_of(pools: dict[str, Tally], counts: dict[str, int]) -> "OrderedDict[str, int]":
    """Everything that `torch.cuda.memory_stats` tells, in its order."""
    found: dict[str, int] = dict(counts)
    for pool, tally in pools.items():
        for name, (amount, number) in _NAMES.items():
            gauge: Gauge = getattr(tally, name)
            found |= _four(f"{amount}.{pool}", gauge.bytes, gauge.most, gauge.gained, gauge.lost)
            if number is not None:
                found |= _four(f"{number}.{pool}", gauge.count, gauge.most_count, gauge.pieces, gauge.lost_pieces)
    for unused in ("oversize_allocations", "oversize_segments"):  # there are none without `max_split_size_mb`
        found |= _four(unused, 0, 0, 0, 0)
    return OrderedDict(sorted(found.items()))


def _four(name: str, now: int, most: int, gained: int, lost: int) -> dict[str, int]:
    return {f"{name}.current": now, f"{name}.peak": most, f"{name}.allocated": gained, f"{name}.freed": lost}
