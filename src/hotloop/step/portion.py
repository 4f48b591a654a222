"""`Portion`: the size of micro-batches after memory ran out."""

from hotloop.values.saved import Count, HasState, Positive, Saved

GOOD_PASSES = 50  # good passes before larger micro-batches are tried
MOST_GOOD_PASSES = 6400


class Portion(HasState):
    """The size of micro-batches. It halves when memory runs out; after a quiet spell it doubles, which is a try.

    A try that fails brings back the size that was good and doubles the spell, so that tries become rare instead of
    going to and fro. `most` is a size that is never exceeded.

    >>> portion = Portion()
    >>> portion.failed(64)
    >>> portion.of(64)
    32
    """

    name = "loop.portion"
    limit: Saved[Positive | None] = None  # items at once; None for all
    failures: Saved[Count] = 0
    cuts: Saved[Count] = 0  # failures on which smaller micro-batches followed
    _good: Saved[Positive | None] = None  # the size to fall back to while a larger one is tried
    _passes: Saved[Count] = 0  # good ones since the last change
    _largest: Saved[Count] = 0  # items of the largest batch so far
    _patience: Saved[Positive] = GOOD_PASSES

    def __init__(self, most: int | None = None, *, grows: bool = True) -> None:
        self.most = self.limit = most
        self._grows = grows

    def of(self, items: int) -> int:
        """The number of items of a batch to compute at once."""
        self._largest = max(self._largest, items)
        return items if self.limit is None else min(items, self.limit)

    def size_for(self, items: int) -> int | None:
        """The same; None for all."""
        size = self.of(items)
        return size if size < items else None

    @property
    def is_tight(self) -> bool:
        """Whether memory ran out, and no larger size has lasted since."""
        return self.failures > 0 and (self.limit != self.most or self._passes < MOST_GOOD_PASSES)

    def failed(self, size: int) -> None:
        """Note that memory ran out with so many items at once."""
        self.failures += 1
        self.cuts += 1
        if self._good is not None and size > self._good:  # a try
            self.limit = self._good
            self._patience = min(2 * self._patience, MOST_GOOD_PASSES)
        else:
            self.limit = max(1, -(-size // 2))
        self._good, self._passes = None, 0

    def same_again(self) -> None:
        """Note that memory ran out by fragmentation: the same size is tried again."""
        self.failures += 1
        self._passes = 0

    def went_well(self, passes: int = 1) -> bool:
        """Note successful passes; returns whether the size changes now."""
        if not self.failures:
            return False
        self._passes += passes
        if self.limit == self.most or self.limit is None or not self._grows or self._passes < self._patience:
            return False
        self._good = self.limit
        self.limit = 2 * self.limit
        if self.most is not None:
            self.limit = min(self.limit, self.most)
        elif self.limit >= self._largest:
            self.limit = None
        self._passes = 0
        return True
