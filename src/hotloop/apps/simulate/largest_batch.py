"""The largest batch that fits, by few runs."""

from collections.abc import Callable
from dataclasses import dataclass

from hotloop.errors import BadArgument
from hotloop.records import Record

WITHIN = 0.01  # share of the largest batch by which the answer may be too small
_RUNS = 24  # a search that needs more than these has lost its way
_LOST = 0.01  # share of the memory by which a line is first thought to be wrong
_SURPRISES = 1  # guesses that were too high, after which only halving is left


@dataclass(frozen=True)
class Outcome(Record):
    """A run with one batch size."""

    fits: bool
    peak: int | None = None  # bytes that it took, as they are compared with the limit; None where it ran out
    limit: int | None = None  # bytes that there are
    limited_by: str = ""  # what filled the memory, in words, where it did not fit


@dataclass(frozen=True)
class SearchResult(Record):
    """The answer of a search."""

    batch: int | None  # the largest that was seen to fit; None: not even 1 does
    too_large: int | None  # the smallest that was seen not to fit; None: nothing was too large
    runs: int
    limited_by: str
    tried: tuple[tuple[int, bool, int | None], ...]  # (batch, fits, peak), in the order of the runs
    ended: str = ""  # why it ended before the answer was known, in words

    @property
    def exact(self) -> bool:
        """Whether one more does not fit."""
        return self.too_large is not None and self.too_large == (self.batch or 0) + 1


class SearchStopped(Exception):
    """Raised by a run that can tell nothing: the search ends with what it knows.

    `reached` is the batch that the run really had, and that fits, where it is smaller than the one asked for.
    """

    def __init__(self, why: str, reached: int = 0) -> None:
        super().__init__(why)
        self.why, self.reached = why, reached


def largest(
    run: Callable[[int], Outcome],
    start: int,
    *,
    most: int | None = None,
    within: float = WITHIN,
) -> SearchResult:
    """Find the largest batch that fits, beginning with one that a person uses.

    Memory grows almost linearly with the batch, so from two runs that told their peaks the limit is guessed; guesses
    narrow a bracket that is halved where they do not help. What is returned was run.

    >>> found = largest(lambda batch: Outcome(batch <= 300, peak=100 + 3 * batch, limit=1000), 16)
    >>> found.batch, found.too_large, found.runs
    (300, 301, 4)
    """
    if start < 1 or (most is not None and most < 1):
        raise BadArgument(f"a search from {start} to {most}", fix="begin with a batch of at least 1")
    search = _Bisection(run, most, within)
    ended = ""
    batch: int | None = min(start, most or start)
    try:
        while batch is not None and len(search.tried) < _RUNS:
            search.try_batch(batch)
            batch = search.next_batch()
    except SearchStopped as stop:
        search.good, ended = max(search.good, stop.reached), stop.why
    tried = tuple((batch, outcome.fits, outcome.peak) for batch, outcome in search.tried)
    return SearchResult(search.good or None, search.bad, len(tried), search.limited_by, tried, ended)


class _Bisection:
    """A bracket: `good` fits, `bad` does not."""

    def __init__(self, run: Callable[[int], Outcome], most: int | None, within: float) -> None:
        self.run = run
        self.most = most
        self.within = within
        self.good = 0
        self.bad: int | None = None
        self.tried: list[tuple[int, Outcome]] = []
        self.limited_by = ""
        self._misses = 0  # runs since the bracket was last made much narrower
        self._predicted = 0  # the batch that was last thought to fit
        self._over = self._under = 0  # runs that did not fit though they were thought to, and the other way round
        self._settled = False  # whether such a surprise has come to its end, so that only halving is left

    def try_batch(self, batch: int) -> None:
        width = None if self.bad is None else self.bad - self.good
        outcome = self.run(batch)
        self.tried.append((batch, outcome))
        surprise = batch <= self._predicted if not outcome.fits else batch > self._predicted > 0
        self._settled = self._settled or (self._over > 0 if outcome.fits else self._under > 0)
        self._over += surprise and not outcome.fits
        self._under += surprise and outcome.fits
        if outcome.fits:
            self.good = max(self.good, batch)
        elif self.bad is None or batch < self.bad:
            self.bad, self.limited_by = batch, outcome.limited_by
        if width is not None and self.bad is not None and not surprise:
            self._misses = 0 if self.bad - self.good <= 0.7 * width else self._misses + 1

    def next_batch(self) -> int | None:
        """What to try now; None where the answer is known well enough."""
        top = self.bad if self.bad is not None else (self.most or 2**31) + 1
        if top - self.good <= max(1, int(self.within * self.good)):
            return None
        guess = None if self._settled or self._misses >= 3 else self._guess()
        self._predicted = guess or 0
        if guess is None:
            guess = max(1, 2 * self.good) if self.bad is None else (self.good + self.bad) // 2
        if self.bad is None and self._under:
            guess = max(guess, self.good + max(1, int(self.good * self.within)) * 2 ** (self._under - 1))
        return min(max(guess, self.good + 1), top - 1)

    def _guess(self) -> int | None:
        """Where a line through the smallest and the largest batch with a known peak meets the limit.

        With one peak, a line from nothing: what does not grow with the batch makes the true one less steep, so that
        the guess fits, and is a second point, unless it is too near to the first to tell a slope.
        """
        known = sorted((batch, seen.peak) for batch, seen in self.tried if seen.peak is not None)
        limit = next((seen.limit for _, seen in reversed(self.tried) if seen.limit is not None), None)
        if limit is None or not known:
            return None
        (less, low), (more, high) = (known[0], known[-1]) if len(known) > 1 else ((0, 0), known[0])
        if high <= low:
            return None
        slope = (high - low) / (more - less)
        if self._over > _SURPRISES:
            return None
        if self.bad is not None and self._over:  # some memory is lost in pieces: how much is found out by doubling
            limit = min(limit, high + int(slope * (self.bad - more))) - int(limit * _LOST) * 2 ** (self._over - 1)
        guess = int(more + (limit - high) / slope)
        if not less and guess < 1.5 * more:
            return None
        if self.bad is None:  # a line through two small batches is not to be followed for ever
            return min(guess, 64 * max(self.good, 1))
        # What was predicted to fit and does is followed by one more, which is predicted not to.
        return guess if guess >= self.good else None
