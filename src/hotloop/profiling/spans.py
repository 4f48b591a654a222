"""Stretches of time as sorted lists of (start, end) that do not touch: joined, cut out, measured."""

import math
from collections.abc import Iterable

Stretch = tuple[float, float]


def joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The time that any of the stretches covers.

    >>> joined([(5, 6), (0, 2), (1, 3), (3, 3)])
    [(0, 3), (5, 6)]
    """
    result: list[Stretch] = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def within(stretches: list[Stretch], others: list[Stretch]) -> list[Stretch]:
    """The time that is in both.

    >>> within([(0, 4), (6, 9)], [(3, 7)])
    [(3, 4), (6, 7)]
    """
    result, at = [], 0
    for start, end in stretches:
        while at < len(others) and others[at][1] <= start:
            at += 1
        index = at
        while index < len(others) and others[index][0] < end:
            result.append((max(start, others[index][0]), min(end, others[index][1])))
            index += 1
    return result


def without(stretches: list[Stretch], others: list[Stretch]) -> list[Stretch]:
    """The time that is in the first and not in the second.

    >>> without([(0, 9)], [(2, 3), (8, 12)])
    [(0, 2), (3, 8)]
    """
    ends = [-math.inf, *(end for stretch in others for end in stretch), math.inf]
    return within(stretches, list(zip(ends[::2], ends[1::2], strict=True)))


def length(stretches: Iterable[Stretch]) -> float:
    """How long they are together."""
    return sum((end - start for start, end in stretches), 0.0)
