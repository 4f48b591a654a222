"""Links between GPUs and the time that collectives take on them: latency and bytes over bandwidth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hotloop.errors import BadArgument
from hotloop.records import Record


@dataclass(frozen=True)
class Interconnect(Record):
    """A link as a collective sees it."""

    key: str
    name: str
    bandwidth: float  # bytes per second in one direction, for each GPU
    latency: float  # seconds of a hop
    shared: bool = False  # one for all GPUs of a node, rather than one for each
    source: str = ""  # in words


@dataclass(frozen=True)
class Cluster(Record):
    """GPUs in nodes: one link inside a node, one between nodes; without the latter all are in one node."""

    inside: Interconnect
    between: Interconnect | None = None
    node: int = 8  # GPUs of a node

    def all_reduce(self, gpus: int, size: float) -> float:
        """Seconds of an all-reduce of so many bytes: by a ring or a tree, whichever is faster.

        ring: 2(n-1)/n · (bytes / slowest link + the hops of one round)
        tree: 2 · (bytes / slowest link + log2(nodes) hops between nodes + a chain inside the node)
        """
        if gpus < 2:
            return 0.0
        tree = 2 * (size / self._slowest(gpus) + self._depth(gpus))
        return min(2 * self._round(gpus, size), tree)

    def all_gather(self, gpus: int, size: float) -> float:
        """Seconds until all have the whole of so many bytes, which lie in shards; a reduce-scatter takes as long.

        ring: (n-1)/n · (bytes / slowest link + the hops of one round)
        """
        return 0.0 if gpus < 2 else self._round(gpus, size)

    def _round(self, gpus: int, size: float) -> float:
        """Once round the ring, less the last hop."""
        across = 0 if (nodes := self._nodes(gpus)) == 1 else nodes
        hops = (gpus - across) * self.inside.latency + (across * self._between.latency if across else 0.0)
        return (gpus - 1) / gpus * (size / self._slowest(gpus) + hops)

    def _slowest(self, gpus: int) -> float:
        """Bytes per second of the ring: that of the slowest link, for a ring passes all of them at once.

        Where each GPU has its own link between nodes there is a ring through each of them.
        """
        nodes = self._nodes(gpus)
        if nodes == 1:
            return self.inside.bandwidth
        in_node = gpus / nodes
        between = self._between.bandwidth * (1 if self._between.shared else in_node)
        return between if in_node <= 1 else min(self.inside.bandwidth, between)

    def _depth(self, gpus: int) -> float:
        """Seconds of the hops from a leaf of the tree to its root."""
        nodes = self._nodes(gpus)
        chain = (math.ceil(gpus / nodes) - 1) * self.inside.latency
        return chain if nodes == 1 else chain + math.ceil(math.log2(nodes)) * self._between.latency

    def _nodes(self, gpus: int) -> int:
        return 1 if self.between is None else math.ceil(gpus / self.node)

    @property
    def _between(self) -> Interconnect:
        assert self.between is not None
        return self.between


@dataclass(frozen=True)
class CollectiveFit(Record):
    """All-reduce as it was measured, and the line through it: latency + bytes / rate."""

    gpus: int
    sizes: tuple[int, ...]  # bytes
    seconds: tuple[float, ...]  # medians
    latency: float  # seconds of an all-reduce of nothing
    rate: float  # bytes per second of the buffer that is reduced
    error: float  # the mean of |measured - line| / measured

    def at(self, size: float) -> float:
        """Seconds of an all-reduce of so many bytes: between two sizes that were measured, else by the line.

        >>> line = fitted(2, [1_000, 3_000, 1_000_000], [0.002, 0.004, 0.005])
        >>> round(line.at(2_000), 4)
        0.003
        """
        known = sorted(zip(self.sizes, self.seconds, strict=True))
        for (small, short), (large, long) in pairwise(known):
            if small <= size <= large:
                return short + (long - short) * (size - small) / (large - small)
        return self.latency + size / self.rate

    @property
    def link(self) -> Interconnect:
        """The link of which a ring of as many ranks would show this line."""
        hops = 2 * (self.gpus - 1)
        return Interconnect(
            key="measured",
            name="as measured here",
            bandwidth=hops / self.gpus * self.rate,
            latency=self.latency / hops,
            source=f"all-reduces of {len(self.sizes)} sizes among {self.gpus} ranks on this machine",
        )


@dataclass(frozen=True)
class MeasuredCluster(Cluster):
    """The ranks whose all-reduces were measured, as they were; of any other number what the line says."""

    measured: CollectiveFit | None = None

    @classmethod
    def of(cls, fit: CollectiveFit) -> "MeasuredCluster":
        return cls(fit.link, None, fit.gpus, fit)

    def all_reduce(self, gpus: int, size: float) -> float:
        if self.measured is None or gpus != self.measured.gpus:
            return super().all_reduce(gpus, size)
        return self.measured.at(size)


def fitted(gpus: int, sizes: Sequence[int], seconds: Sequence[float]) -> CollectiveFit:
    """The line latency + bytes / rate through measured all-reduces, by least squares of the relative errors.

    >>> line = fitted(2, [1_000, 1_000_000], [0.002, 0.003])
    >>> round(line.latency, 4), round(line.rate / 1e9, 1)
    (0.002, 1.0)
    """
    if gpus < 2 or len(set(sizes)) < 2:
        raise BadArgument("a line needs two sizes and two ranks", fix="measure all-reduces of several sizes")
    # In units of each measurement, so that small and large sizes count alike.
    ones = [1 / each for each in seconds]
    slopes = [size / each for size, each in zip(sizes, seconds, strict=True)]
    aa, ab, bb = (
        sum(map(math.prod, zip(*pair, strict=True))) for pair in ((ones, ones), (ones, slopes), (slopes, slopes))
    )
    a, b = sum(ones), sum(slopes)
    det = aa * bb - ab * ab
    latency, slope = (a * bb - b * ab) / det, (b * aa - a * ab) / det
    if latency <= 0:  # then all of it is bandwidth
        latency, slope = 0.0, b / bb
    elif slope <= 0:
        latency, slope = a / aa, 0.0
    off = [abs(latency + slope * size - each) / each for size, each in zip(sizes, seconds, strict=True)]
    rate = 1 / slope if slope > 0 else 1e15  # JSON has no infinity
    return CollectiveFit(gpus, tuple(sizes), tuple(seconds), latency, rate, sum(off) / len(off))
