"""`Portion`: the size of micro-batches after memory ran out."""

from collections.abc import Callable

from hotloop.values.saved import Count, HasState, Positive, Saved

GOOD_PASSES = 50  # good passes before larger micro-batches are tried
MOST_GOOD_PASSES = 6400
MORE_ROOM = 1.1  # times the room of the last failure: reason enough to try at once
LOOK_EVERY = 10  # passes between two looks at the room


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
    _room_at_failure: Saved[Count | None] = None
    _room_at_try: Saved[Count] = 0
    _good: Saved[Positive | None] = None  # the size to fall back to while a larger one is tried
    _passes: Saved[Count] = 0  # good ones since the last change
    _largest: Saved[Count] = 0  # items of the largest batch so far
    _patience: Saved[Positive] = GOOD_PASSES

    def __init__(
        self, most: int | None = None, room: Callable[[], int | None] = lambda: None, *, grows: bool = True
    ) -> None:
        self.most = most
        self.limit = most
        self._room, self._grows = room, grows

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
        room = self._room()
        if self._good is not None and size > self._good:  # a try
            self.limit, self._good = self._good, None
            self._patience = min(2 * self._patience, MOST_GOOD_PASSES)
            # The room that the try was made with was not enough, however little the failure has left of it.
            room = room if room is None else max(room, self._room_at_failure or 0, self._room_at_try)
        else:
            self.limit, self._good = max(1, -(-size // 2)), None
        self._room_at_failure = room
        self._passes = 0

    def same_again(self) -> None:
        """Note that memory ran out by fragmentation: the same size is tried again."""
        self.failures += 1
        self._passes = 0

    def went_well(self, passes: int = 1) -> bool:
        """Note successful passes; returns whether the size changes now."""
        if not self.failures:
            return False
        self._passes += passes
        if self.limit == self.most or self.limit is None or not self._grows:
            return False
        if self._passes < self._patience and not self._has_more_room():
            return False
        self._room_at_try = self._room() or 0
        self._good = self.limit
        self.limit = 2 * self.limit
        if self.most is not None:
            self.limit = min(self.limit, self.most)
        elif self.limit >= self._largest:
            self.limit = None
        self._passes = 0
        return True

    def _has_more_room(self) -> bool:
        if self._passes % LOOK_EVERY or self._room_at_failure is None:
            return False
        room = self._room()
        if room is None or room < MORE_ROOM * max(self._room_at_failure, 1):
            return False
        self._room_at_failure *= 2  # twice the items need about twice the room: only more than that is reason again
        return True
