"""How much is tried: enough for each change, and more with HOTLOOP_TEST_RANDOM=1, as in a nightly run."""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TypeVar

THOROUGH = bool(os.environ.get("HOTLOOP_TEST_RANDOM"))
R = TypeVar("R")
C = TypeVar("C")


def tries(usual: int, thorough: int) -> int:
    """How many examples, steps or moments a test takes."""
    return thorough if THOROUGH else usual


def some(cases: Iterable[R], usual: Iterable[R]) -> list[R]:
    """All cases where everything is tried, and else the usual ones of them."""
    every, few = list(cases), list(usual)
    assert all(case in every for case in few)
    return every if THOROUGH else few


def dealt(rows: Sequence[R], columns: Sequence[C], each: int = 1) -> list[tuple[R, C]]:
    """Pairs in which every row has `each` of the columns, and every column comes as often; all where all is tried.

    >>> dealt("abcd", [1, 2, 3])  # doctest: +SKIP
    [('a', 1), ('b', 2), ('c', 3), ('d', 1)]
    """
    if THOROUGH:
        return list(product(rows, columns))
    return [
        (row, columns[(number * each + more) % len(columns)]) for number, row in enumerate(rows) for more in range(each)
    ]
