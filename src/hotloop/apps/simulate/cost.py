"""Seconds that a part of an operation takes on a card: the longest of launching, computing and moving, roughly."""

import math
from functools import lru_cache

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.products import Product, WorkPart
from hotloop.apps.simulate.table import ArchitectureTable, Curve

_INSTEAD = {"tf32": "fp32", "bf16": "fp32", "fp16": "fp32", "fp8": "bf16"}  # what computes where a card lacks one
_FAST_DOUBLE = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))  # capabilities of cards made for fp64
_CACHE_PER_SM = {  # bytes of L2, by capability
    (7, 0): 79e3,
    (7, 5): 100e3,
    (8, 0): 388e3,
    (8, 6): 75e3,
    (8, 9): 560e3,
    (9, 0): 396e3,
    (10, 0): 850e3,
    (12, 0): 560e3,
}
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32))
_SPLITS = (1, 2, 4, 8, 16)
_SHORTEST = 64  # of the inner dimension: less is filled up with zeros
_SPLIT_COST = 0.9  # parts of sums must be added up again


def seconds_of(part: WorkPart, card: Card, table: ArchitectureTable) -> float:
    """Seconds of a part on a card.

    The efficiency of a curve is work over (work + half-work): a latency and a rate. Computing and moving overlap.
    Where operations with like sizes were measured, the curve is corrected by what it was off for them.
    """
    curved = seconds(part, card, table.curve(part), floor=table.floor, cache=table.cache)
    return max(table.floor * part.kernels, curved * math.exp(table.correction(part)))


def seconds(part: WorkPart, card: Card, curve: Curve, *, floor: float, cache: float) -> float:
    """The same for one curve, as the calibration fits it."""
    compute = 0.0
    if part.flops:
        shape = fill(part.product, card.sms, curve.tile) if part.product and curve.tile else 1.0
        compute = part.flops / (peak(card, part.precision) * curve.compute * shape)
    memory = part.bytes / (card.bandwidth * curve.memory * cached(part.bytes, card, cache))
    return max(floor * part.kernels, curve.latency * part.kernels + _together(compute, memory, curve.sharpness))


def peak(card: Card, precision: str) -> float:
    """Dense operations per second, or those of what the card would use in its place."""
    if precision == "fp64":
        return card.peaks["fp32"] / (2 if card.capability in _FAST_DOUBLE else 64)
    while precision not in card.peaks:
        precision = _INSTEAD.get(precision, "fp32")
    return card.peaks[precision]


def cache_of(card: Card) -> float:
    """Bytes of the L2 cache, from the number of multiprocessors."""
    return _CACHE_PER_SM.get(card.capability, 100e3) * card.sms


def cached(size: float, card: Card, cache: float) -> float:
    """How much quicker than memory: what fits into the L2 cache comes from there."""
    return 1 + (cache - 1) / (1 + (2 * size / cache_of(card)) ** 2)


def _together(one: float, other: float, sharpness: float) -> float:
    longest = max(one, other)
    if longest == 0:
        return 0.0
    overlap: float = (1 + (min(one, other) / longest) ** sharpness) ** (1 / sharpness)
    return longest * overlap


@lru_cache(maxsize=65_536)
def fill(product: Product, sms: int, tile: float) -> float:
    """The share of a card that a product can use: tiles are filled up, and the last wave is seldom full.

    The best of several tiles, and of several ways to split long sums, as the libraries choose.
    """
    largest = _TILES[0][0] * _TILES[0][1]
    least = float("inf")
    for high, wide in _TILES:
        area = high * wide
        quality = (area / (area + tile)) / (largest / (largest + tile))
        tiles = product.count * -(-product.rows // high) * -(-product.columns // wide)
        for split in _SPLITS:
            waves = -(-tiles * split // sms)
            inner = max(product.inner / split, _SHORTEST)
            work = 2.0 * waves * sms * area * inner / (quality * (_SPLIT_COST if split > 1 else 1.0))
            least = min(least, work)
    return product.flops / least if least > 0 else 1.0
