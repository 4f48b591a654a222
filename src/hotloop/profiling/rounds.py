"""When a step ends, where nobody says so: found from the calls of optimizers."""

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median

LEAST = 3  # steps that are compared to see whether times have settled
RECENT = 64  # calls by which optimizers are compared: one that has done its part must not be waited for


class Rounds:
    """Several optimizers take turns, as in a GAN: a step is a full round, which ends with the one that steps least.

    >>> rounds = Rounds()
    >>> [rounds.ends(optimizer) for optimizer in ("critic", "critic", "generator") * 2]
    [True, True, True, False, False, True]
    """

    def __init__(self) -> None:
        self._calls: deque[object] = deque(maxlen=RECENT)

    def ends(self, optimizer: object) -> bool:
        """Whether a step ends with this call; among equals, with the one that came last into play."""
        first = optimizer not in self._calls  # nothing can be said yet
        self._calls.append(optimizer)
        calls = Counter(self._calls)  # in the order in which they came
        places = {name: place for place, name in enumerate(calls)}
        return first or optimizer == min(calls, key=lambda name: (calls[name], -places[name]))


def settled(times: Sequence[float]) -> bool:
    """Whether the last steps took about equally long, so that the warm-up is over.

    >>> settled([9.0, 1.0, 1.1, 1.0]), settled([9.0, 4.0, 1.0])
    (True, False)
    """
    last = list(times)[-LEAST:]
    return len(last) == LEAST and max(last) - min(last) <= 0.25 * median(last)
