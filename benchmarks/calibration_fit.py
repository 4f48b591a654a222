"""Curves from measurements: a few parameters, found so that what went wrong in a few measurements does not matter."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.cost import cached, fill, peak
from hotloop.apps.simulate.nearby import Array, Nearby, closeness, doublings
from hotloop.apps.simulate.products import WorkPart
from hotloop.apps.simulate.table import Curve

TILES = (512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
SHARPNESSES = (1.0, 2.0, 4.0, 8.0)
CACHES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
_STARTS = ((0.7, 0.6), (0.15, 0.6), (0.7, 0.15), (0.15, 0.15))  # memory, compute: from one alone a valley may be missed
_LIKELY = 4
_SHORT = 2e-5  # seconds: what is shorter counts less, as the less of a training it is
_LONG = 0.5  # of the count of a long one
_LEAST_COUNT = 0.25
REACHES = (1.0, 1.5, 2.0, 3.0)  # doublings of a size over which two operations know of one another
_DEVIATION = 0.15  # squared, of the logarithm of a time about its curve
_NOISES = (0.01, 0.04)  # the same for one operation that is measured again, or chosen another kernel for
_UNSEEN = 1.8  # whole sizes left out, in all precisions, were missed by this much more than single samples
_NOISE = 0.05  # of a logarithm: deviations beyond it count in proportion, not squared
_LEAST = np.log([1e-8, 1e-3, 1e-3])  # latency, memory, compute
_MOST = np.log([1e-2, 1.5, 1.5])


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    part: WorkPart
    seconds: float


def fit(samples: Sequence[Sample], card: Card, *, floor: float, cache: float) -> Curve:
    """The curve nearest to the measurements, and how far they are scattered about it.

    Tile and sharpness are chosen from a few: all are tried in haste, the likeliest with care.
    """
    parts = [sample.part for sample in samples]
    measured = np.log([sample.seconds for sample in samples])
    computes = any(part.flops for part in parts)
    tiles = TILES if all(part.product for part in parts) else (0.0,)
    ideals = [(tile, _Ideal.of(parts, card, tile, floor, cache)) for tile in tiles]
    latency = max(float(np.exp(measured.min())) / 2, 2e-8)
    starts = [np.log([latency, *shares[: 1 + computes]]) for shares in (_STARTS if computes else _STARTS[:1])]
    tries = [
        _Try(measured, ideal, sharpness, tile)
        for tile, ideal in ideals
        for sharpness in (SHARPNESSES if computes else (8.0,))
    ]
    likeliest = sorted(tries, key=lambda each: each.search(starts[:2], rounds=60, restarts=0)[0])[:_LIKELY]
    _, best = min((each.search(starts, rounds=300, restarts=1) for each in likeliest), key=lambda found: found[0])
    return replace(best, spread=spread(_residuals(samples, card, best, floor, cache)), samples=len(samples))


class Fitted(NamedTuple):
    """A curve, what the samples say beyond it, and the logarithms by which each is missed without itself."""

    curve: Curve
    nearby: Nearby | None
    left: list[float]


def fit_nearby(samples: Sequence[Sample], card: Card, *, floor: float, cache: float) -> Fitted:
    """The curve of the samples, corrected where they lie; its spread is that of foretelling each from the others."""
    curve = fit(samples, card, floor=floor, cache=cache)
    off = _residuals(samples, card, curve, floor, cache)
    counts = _counts(np.array([sample.seconds for sample in samples]))
    like = len({len(sample.part.traits) for sample in samples}) == 1
    places = [sample.part.traits for sample in samples] if like else []
    nearby, left = interpolate(places, off, counts) if places else (None, off)
    free = len(samples) - 2 - 2 * any(sample.part.flops for sample in samples)
    wider = float(np.sqrt(len(samples) / max(free, 1)))  # the curve itself was drawn through all of them
    long = left[counts >= _LONG] if (counts >= _LONG).sum() >= 4 else left
    return Fitted(replace(curve, spread=spread(_UNSEEN * wider * long)), nearby, [float(each) for each in left])


def interpolate(places: Sequence[tuple[int, ...]], off: Array, counts: Array) -> tuple[Nearby | None, Array]:
    """Weights that explain how far a curve was off at the places, and what each would be off without itself.

    This is a Gaussian process: its reach and its noise are those that foretell each measurement best from the
    others, and None where the curve alone does. `counts` says how much each measurement counts in that.
    """
    best, left, chosen = float(np.average(np.abs(off), weights=counts)), off, None
    if len({*places}) < 3 or not places[0]:
        return None, off
    logs = doublings(places)
    for reach in REACHES:
        near = _DEVIATION * closeness(logs, logs, reach)
        for noise in _NOISES:
            inverse = np.linalg.inv(near + noise * np.eye(len(off)))
            weights = inverse @ off
            without = weights / np.diag(inverse)  # the error at each place if it had not been measured
            loss = float(np.average(np.abs(without), weights=counts))
            if loss < best:
                rounded = tuple(round(_DEVIATION * float(weight), 4) for weight in weights)
                best, left, chosen = loss, without, Nearby(reach, tuple(places), rounded)
    return chosen, left


def fit_cache(samples: Sequence[Sample], card: Card, *, floor: float) -> float:
    """How much quicker the L2 cache is than memory, from operations that memory bounds."""

    def loss(cache: float) -> float:
        curve = fit(samples, card, floor=floor, cache=cache)
        counts = _counts(np.array([sample.seconds for sample in samples]))
        return _robust(_residuals(samples, card, curve, floor, cache), counts)

    return min(CACHES, key=loss) if samples else 2.0


def spread(residuals: Iterable[float]) -> float:
    """The standard deviation, from the middle four fifths; never less than what measuring again would give.

    >>> spread([0.0] * 10)
    0.02
    """
    low, high = np.quantile(np.asarray(list(residuals), dtype=np.float64), [0.1, 0.9])
    return max(float(high - low) / 2.5631, 0.02)


@dataclass(frozen=True)
class _Ideal:
    """Seconds that the card would need at its best, as arrays over the samples."""

    kernels: Array
    moving: Array
    computing: Array
    floor: float

    @classmethod
    def of(cls, parts: Sequence[WorkPart], card: Card, tile: float, floor: float, cache: float) -> "_Ideal":
        computing = [_computing(part, card, tile) for part in parts]
        moving = [part.bytes / (card.bandwidth * cached(part.bytes, card, cache)) for part in parts]
        kernels = np.array([part.kernels for part in parts], dtype=np.float64)
        return cls(kernels, np.array(moving), np.array(computing), floor)

    def seconds(self, logs: Array, sharpness: float) -> Array:
        latency, memory, *compute = np.exp(_inside(logs))
        one, other = self.moving / memory, self.computing / (compute[0] if compute else 1.0)
        longest = np.maximum(np.maximum(one, other), 1e-30)
        together = longest * (1 + (np.minimum(one, other) / longest) ** sharpness) ** (1 / sharpness)
        taken: Array = np.maximum(self.floor * self.kernels, latency * self.kernels + together)
        return taken


@dataclass(frozen=True)
class _Try:
    """One tile and one sharpness, for which the other parameters are searched."""

    measured: Array
    ideal: _Ideal
    sharpness: float
    tile: float

    def loss(self, logs: Array) -> float:
        off = self.measured - np.log(self.ideal.seconds(logs, self.sharpness))
        return _robust(off, _counts(np.exp(self.measured)))

    def search(self, starts: Sequence[Array], *, rounds: int, restarts: int) -> tuple[float, Curve]:
        """How far the best curve is from the measurements, and the curve."""
        found = min((minimise(self.loss, start, rounds=rounds, restarts=restarts) for start in starts), key=self.loss)
        latency, memory, *compute = (float(value) for value in np.exp(_inside(found)))
        return self.loss(found), Curve(latency, memory, compute[0] if compute else 1.0, self.sharpness, self.tile)


def _computing(part: WorkPart, card: Card, tile: float) -> float:
    if not part.flops:
        return 0.0
    share = fill(part.product, card.sms, tile) if part.product and tile else 1.0
    return part.flops / (peak(card, part.precision) * share)


def _residuals(samples: Sequence[Sample], card: Card, curve: Curve, floor: float, cache: float) -> Array:
    """Logarithms of what was measured over what the curve says."""
    logs = np.log([curve.latency, curve.memory, curve.compute])
    ideal = _Ideal.of([sample.part for sample in samples], card, curve.tile, floor, cache)
    left: Array = np.log([sample.seconds for sample in samples]) - np.log(ideal.seconds(logs, curve.sharpness))
    return left


def _inside(logs: Array) -> Array:
    bounded: Array = np.clip(logs, _LEAST[: len(logs)], _MOST[: len(logs)])
    return bounded


def _counts(seconds: Array) -> Array:
    counts: Array = np.clip(seconds / _SHORT, _LEAST_COUNT, 1.0)
    return counts


def _robust(residuals: Array, counts: Array) -> float:
    return float(np.average(np.sqrt(1 + (residuals / _NOISE) ** 2) - 1, weights=counts))


def minimise(loss: Callable[[Array], float], start: Array, *, rounds: int = 300, restarts: int = 1) -> Array:
    """The point where a smooth function of a few numbers is least, by a simplex that walks downhill.

    >>> minimise(lambda x: float((x[0] - 1) ** 2 + (x[1] + 2) ** 2), np.zeros(2)).round(3).tolist()
    [1.0, -2.0]
    """
    best = start.astype(np.float64)
    for _ in range(restarts + 1):  # a simplex that has shrunk on a slope is opened again
        points = [best, *(best + 0.7 * unit for unit in np.eye(len(best)))]
        best = _walk(loss, [(loss(point), point) for point in points], rounds)
    return best


def _walk(loss: Callable[[Array], float], simplex: list[tuple[float, Array]], rounds: int) -> Array:
    for _ in range(rounds):
        simplex.sort(key=lambda pair: pair[0])
        width = max(float(np.abs(point - simplex[0][1]).max()) for _, point in simplex)
        if simplex[-1][0] - simplex[0][0] < 1e-10 and width < 1e-4:  # equal values alone may lie on both slopes
            break
        worst = simplex[-1]
        centre = np.mean([point for _, point in simplex[:-1]], axis=0)

        def at(distance: float, centre: Array = centre, worst: Array = worst[1]) -> tuple[float, Array]:
            point = centre + distance * (centre - worst)
            return loss(point), point

        mirrored = at(1.0)
        if mirrored[0] < simplex[0][0]:
            simplex[-1] = min(mirrored, at(2.0), key=lambda pair: pair[0])
        elif mirrored[0] < simplex[-2][0]:
            simplex[-1] = mirrored
        else:
            nearer = at(0.5 if mirrored[0] < worst[0] else -0.5)
            if nearer[0] < min(worst[0], mirrored[0]):
                simplex[-1] = nearer
            else:
                lowest = simplex[0][1]
                shrunk = [lowest + 0.5 * (point - lowest) for _, point in simplex[1:]]
                simplex[1:] = [(loss(point), point) for point in shrunk]
    return min(simplex, key=lambda pair: pair[0])[1]
