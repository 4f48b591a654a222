"""A budget of memory: read from words, and kept by choosing which blocks to compute again for the least time."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from hotloop.errors import BadArgument
from hotloop.records import Record

MANY_WAYS = 4_000  # ways to save that are weighed exactly; of more, those that save about the same are taken as one
GRID = 1_000  # steps of saving that are told apart then
SIZES = 40  # of the largest block that are tried
UNITS = {"": 1, "B": 1, **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}}
UNITS |= {f"{p}IB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
_FIX = 'give bytes, or words such as "8GiB", "500MB" or "80%" (of the device)'


@dataclass(frozen=True)
class CheckpointCandidate(Record):
    """A block of a model that activation checkpointing can take. What is before a dot in its name contains it."""

    name: str
    saved: int  # bytes that it keeps for the backward pass, and would not
    seconds: float  # of its forward pass, which would run twice


def bytes_of(budget: int | str, total: int | None = None) -> int:
    """The bytes of a budget; `total` are those of the device, of which a budget in % is a share.

    >>> bytes_of("8GiB"), bytes_of("1.5 GB"), bytes_of("80%", total=1000)
    (8589934592, 1500000000, 800)
    """
    if isinstance(budget, str):
        read = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b|%|)\s*", budget, re.IGNORECASE)
        if read is None or (read[2] and read[2].upper() not in (*UNITS, "%")):
            raise BadArgument(f"memory_budget={budget!r}", fix=_FIX)
        if read[2] == "%":
            return _share_of(budget, float(read[1]), total)
        found = int(float(read[1]) * UNITS[read[2].upper()])
    elif isinstance(budget, int) and not isinstance(budget, bool):
        found = budget
    else:
        raise BadArgument(f"memory_budget={budget!r}", fix=_FIX)
    if found < 1:
        raise BadArgument(f"memory_budget={budget!r} is no memory at all", fix=_FIX)
    return found


def _share_of(budget: str, percent: float, total: int | None) -> int:
    if not 0 < percent <= 100:
        raise BadArgument(f"memory_budget={budget!r}", fix="give more than 0% and at most 100%")
    if total is None:
        raise BadArgument(f"memory_budget={budget!r} of a device that does not tell its memory", fix='say "8GiB"')
    return int(total * percent / 100)


def saving(blocks: Iterable[CheckpointCandidate], headroom: int = 0) -> int:
    """Bytes by which the peak falls when these blocks are computed again.

    In the backward pass they come back one at a time, so the largest of them is there nevertheless, unless the peak is
    elsewhere: `headroom` is how far the end of the forward pass lies below it.

    >>> large, small = CheckpointCandidate("a", 30, 1.0), CheckpointCandidate("b", 20, 1.0)
    >>> saving([large, small]), saving([large], headroom=40)
    (20, 30)
    """
    sizes = [block.saved for block in blocks]
    return sum(sizes) - max(0, max(sizes, default=0) - headroom)


def choose(blocks: Sequence[CheckpointCandidate], needed: int, headroom: int = 0) -> tuple[str, ...] | None:
    """The blocks that save `needed` bytes (by `saving`) and take the least time to compute again; None where none do.

    A block and one inside it are never both chosen.

    >>> outer, inner = CheckpointCandidate("b", 100, 0.1), CheckpointCandidate("b.c", 60, 0.02)
    >>> choose([CheckpointCandidate("a", 100, 0.5), outer, inner], needed=50, headroom=1000)
    ('b.c',)
    """
    if needed <= 0:
        return ()
    best: _Way | None = None
    for largest in _largest_worth_a_look(blocks, headroom):
        target = needed + max(0, largest - headroom)
        allowed = [block for block in blocks if block.saved <= largest]
        if sum(block.saved for block in allowed) < target:
            continue
        for way in _ways(_trees(allowed), target):
            if way.saved >= target and (best is None or way.seconds < best.seconds):
                best = way
    if best is None:
        return None
    chosen = best.names()
    return tuple(block.name for block in blocks if block.name in chosen)


def most(blocks: Sequence[CheckpointCandidate], headroom: int = 0) -> tuple[str, ...]:
    """The blocks that save as much as can be saved."""
    best: list[CheckpointCandidate] = []
    for largest in _largest_worth_a_look(blocks, headroom):
        trees = _trees([block for block in blocks if block.saved <= largest])
        chosen = [block for tree in trees for block in tree.heaviest()]
        best = max(best, chosen, key=lambda some: saving(some, headroom))
    names = {block.name for block in best}
    return tuple(block.name for block in blocks if block.name in names)


def _largest_worth_a_look(blocks: Sequence[CheckpointCandidate], headroom: int) -> list[int]:
    """Sizes that the largest chosen block may have; those within the headroom all come free."""
    sizes = {block.saved for block in blocks if block.saved > 0}
    free = [size for size in sizes if size <= headroom]
    found = sorted([*([max(free)] if free else []), *(size for size in sizes if size > headroom)], reverse=True)
    return found[:: -(-len(found) // SIZES)] if found else []


class _Way(NamedTuple):
    """A way to save: what it saves and takes, the block that it adds to other ways, and those."""

    saved: int
    seconds: float
    block: str | None = None
    before: tuple["_Way", ...] = ()

    def names(self) -> set[str]:
        found: set[str] = set()
        ways = [self]
        while ways:  # and no recursion: each block of a deep model adds a level
            way = ways.pop()
            found |= set() if way.block is None else {way.block}
            ways += way.before
        return found


@dataclass(frozen=True)
class _Tree:
    """A block and the blocks inside it."""

    block: CheckpointCandidate
    inside: "list[_Tree]"

    def heaviest(self) -> list[CheckpointCandidate]:
        parts = [block for tree in self.inside for block in tree.heaviest()]
        return parts if sum(part.saved for part in parts) > self.block.saved else [self.block]


def _trees(blocks: Sequence[CheckpointCandidate]) -> list[_Tree]:
    """Blocks below those that contain them."""
    roots: list[_Tree] = []
    known: dict[str, _Tree] = {}
    for block in sorted(blocks, key=lambda block: block.name.count(".")):
        parts = block.name.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
        holder = next((known[name] for name in above if name in known), None)
        known[block.name] = tree = _Tree(block, [])
        (roots if holder is None else holder.inside).append(tree)
    return roots


def _ways(trees: Iterable[_Tree], target: int) -> list[_Way]:
    """The ways to save with these trees: none that another one beats in both respects."""

    def of(tree: _Tree) -> list[_Way]:
        whole = _Way(min(tree.block.saved, target), tree.block.seconds, tree.block.name)
        return _unbeaten([*_ways(tree.inside, target), whole], target)

    def joined(a: list[_Way], b: list[_Way]) -> list[_Way]:
        pairs = [_Way(min(x.saved + y.saved, target), x.seconds + y.seconds, None, (x, y)) for x in a for y in b]
        return _unbeaten(pairs, target)

    return reduce(joined, map(of, trees), [_Way(0, 0.0)])


def _unbeaten(ways: list[_Way], target: int) -> list[_Way]:
    """The ways by falling saving and time."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: (-way.saved, way.seconds)):
        if not kept or way.seconds < kept[-1].seconds:
            kept.append(way)
    if len(kept) <= MANY_WAYS:
        return kept
    step = max(target // GRID, 1)
    coarse = {way.saved // step: way for way in kept}  # the last of each is the quickest
    return [kept[0], *(way for way in coarse.values() if way is not kept[0])]
