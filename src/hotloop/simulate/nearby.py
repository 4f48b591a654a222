"""What curves leave over: measured operations with like sizes say how far a curve is off where one is asked about."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hotloop.records import Record

Array = NDArray[np.float64]

REACHES = (1.0, 1.5, 2.0, 3.0)  # doublings of a size over which two operations know of one another
_DEVIATION = 0.15  # squared, of the logarithm of a time about its curve
_NOISES = (0.01, 0.04)  # the same for one operation that is measured again, or chosen another kernel for
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
        near = _closeness(_logs([traits]), _places(self.places), self.reach)[0]
        return float(np.clip(near @ np.array(self.weights), -_MOST, _MOST))


def interpolate(places: Sequence[tuple[int, ...]], off: Array, counts: Array) -> tuple[Nearby | None, Array]:
    """Weights that explain how far a curve was off at the places, and what each would be off without itself.

    This is a Gaussian process: its reach and its noise are those that foretell each measurement best from the
    others, and None where the curve alone does. `counts` says how much each measurement counts in that.
    """
    best, left, chosen = float(np.average(np.abs(off), weights=counts)), off, None
    if len({*places}) < 3 or not places[0]:
        return None, off
    logs = _logs(places)
    for reach in REACHES:
        near = _DEVIATION * _closeness(logs, logs, reach)
        for noise in _NOISES:
            inverse = np.linalg.inv(near + noise * np.eye(len(off)))
            weights = inverse @ off
            without = weights / np.diag(inverse)  # the error at each place if it had not been measured
            loss = float(np.average(np.abs(without), weights=counts))
            if loss < best:
                rounded = tuple(round(_DEVIATION * float(weight), 4) for weight in weights)
                best, left, chosen = loss, without, Nearby(reach, tuple(places), rounded)
    return chosen, left


def _closeness(one: Array, other: Array, reach: float) -> Array:
    squares = ((one[:, None, :] - other[None, :, :]) ** 2).sum(axis=-1)
    close: Array = np.exp(-squares / (2 * reach**2))
    return close


def _logs(places: Sequence[tuple[int, ...]]) -> Array:
    logs: Array = np.log2(np.maximum(np.array(places, dtype=np.float64), 1.0))
    return logs


@lru_cache(maxsize=512)
def _places(places: tuple[tuple[int, ...], ...]) -> Array:
    return _logs(places)
