"""When a step ends, where nobody says so: found from the calls of optimizers."""

from collections import Counter, deque

RECENT = 64  # calls by which optimizers are compared: one that has done its part must not be waited for
CALLS_TO_WAIT = 12  # calls for which optimizers are waited for that were built and have not stepped yet


class Rounds:
    """Several optimizers take turns, as in a GAN: a step is a full round, which ends with the one that steps least.

    >>> rounds = Rounds()
    >>> rounds.expect("critic"), rounds.expect("generator")
    (None, None)
    >>> [rounds.ends(optimizer) for optimizer in ("critic", "critic", "generator") * 2]
    [False, False, True, False, False, True]
    """

    def __init__(self) -> None:
        self._calls: deque[object] = deque(maxlen=RECENT)
        self._expected: set[object] = set()

    @property
    def calls(self) -> int:
        """How many calls there were lately."""
        return len(self._calls)

    def expect(self, optimizer: object) -> None:
        """An optimizer was built."""
        self._expected.add(optimizer)

    def forget(self, optimizer: object) -> None:
        """An optimizer is gone, and is not waited for."""
        self._expected.discard(optimizer)

    def ends(self, optimizer: object) -> bool:
        """Whether a step ends with this call; among equals, with the one that came last into play."""
        self._expected.discard(optimizer)
        self._calls.append(optimizer)
        if self._expected and len(self._calls) < CALLS_TO_WAIT:
            return False
        calls = Counter(self._calls)  # in the order in which they came
        places = {name: place for place, name in enumerate(calls)}
        return optimizer == min(calls, key=lambda name: (calls[name], -places[name]))
