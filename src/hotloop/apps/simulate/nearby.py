"""What curves leave over: measured operations with like sizes say how far a curve is off where one is asked about."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hotloop.records import Record

Array = NDArray[np.float64]

_MOST = 1.5  # of a logarithm, by which a curve may be corrected


@dataclass(frozen=True)
class Nearby(Record):
    """Weighted operations about which a curve is off; the weight of each fades with the distance from it.

    Distances are doublings: an operation of twice the rows and twice the columns is √2 away.
    """

    reach: float
    places: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]

    def correction(self, traits: tuple[int, ...]) -> float:
        """The logarithm of the factor by which an operation of such sizes takes longer than its curve says.

        >>> Nearby(1.0, ((64, 64),), (0.5,)).correction((64, 64))
        0.5
        """
        if not self.weights or len(traits) != len(self.places[0]):
            return 0.0
        near = closeness(doublings([traits]), self._logs, self.reach)[0]
        return float(np.clip(near @ np.array(self.weights), -_MOST, _MOST))

    @cached_property
    def _logs(self) -> Array:
        return doublings(self.places)


def closeness(one: Array, other: Array, reach: float) -> Array:
    """From 1 where two places are the same to 0, for each pair."""
    squares = ((one[:, None, :] - other[None, :, :]) ** 2).sum(axis=-1)
    close: Array = np.exp(-squares / (2 * reach**2))
    return close


def doublings(places: Sequence[tuple[int, ...]]) -> Array:
    """Sizes as how often they were doubled."""
    found: Array = np.log2(np.maximum(np.array(places, dtype=np.float64), 1.0))
    return found
