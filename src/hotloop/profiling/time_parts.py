"""When each step began and ended, and what every moment of it was spent on. Pure functions of events."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hotloop.profiling.profile_record import TimeParts
from hotloop.profiling.trace import ON_DEVICE, Kind, TraceEvent

Stretch = tuple[float, float]  # of time; lists of them are sorted and do not touch


def on_device(events: Iterable[TraceEvent]) -> bool:
    """Whether a device apart from the host did anything."""
    return any(event.kind in ON_DEVICE for event in events)


def replayed(events: Sequence[TraceEvent], steps: Sequence[Stretch]) -> float:
    """Seconds of the steps in which the device replayed CUDA graphs."""
    return length(within(joined(steps), _times(events, "replay")))


def divided(events: Sequence[TraceEvent], steps: Sequence[Stretch]) -> TimeParts:
    """The time of the steps, divided between the parts."""
    order = _on_device(events) if on_device(events) else _on_host(events)
    rest, spent = joined(steps), {}
    for name, stretches in order:  # every moment goes to the first that claims it
        spent[name] = length(within(rest, stretches))
        rest = without(rest, stretches)
    return TimeParts(**spent, gaps=length(rest))  # and what nobody claims is a gap


def steps_in(events: Sequence[TraceEvent]) -> list[Stretch]:
    """Each step from its beginning to its end.

    A step ends where it was marked on the host, or when the device has done what was asked of it before the mark, if
    that is later: a host that runs ahead has not ended the step.
    """
    marks = sorted(event.end for event in events if event.kind == "mark")
    asked = {e.correlation: e.start for e in events if e.kind in ("call", "wait") and e.correlation}
    work = sorted((asked.get(e.correlation or 0, e.start), e.end) for e in events if e.kind in ON_DEVICE)
    begins = [begin for begin, _ in work]
    done: list[float] = []
    for _, end in work:
        done.append(max(end, done[-1] if done else end))
    ends = []
    for mark in marks:
        before = bisect_left(begins, mark)
        ends.append(max(mark, done[before - 1]) if before else mark)
    return list(pairwise(ends))


def training_threads(events: Iterable[TraceEvent]) -> set[int]:
    """The threads of the host in which the loop runs: the one that ends steps, and those of backward passes.

    Others, such as the one that pins batches, are busy beside them, and their time is not the loop's.
    """
    return {e.thread for e in events if e.kind == "mark" or e.name.startswith("autograd::engine")}


def _on_device(events: Sequence[TraceEvent]) -> list[tuple[str, list[Stretch]]]:
    """What the device did; where it did nothing, what the host did instead."""
    threads = training_threads(events)
    return [
        ("compute", _times(events, "kernel", "replay")),  # between two kernels of a graph, no host is waited for
        ("communication", _times(events, "communication")),
        ("copies", _times(events, "copy")),
        ("data", _times(events, "data", threads=threads)),
        ("waits", _times(events, "wait", threads=threads)),
    ]


def _on_host(events: Sequence[TraceEvent]) -> list[tuple[str, list[Stretch]]]:
    """What the host did."""
    threads = training_threads(events)
    return [
        ("data", _times(events, "data", threads=threads)),
        ("compute", _times(events, "operation", threads=threads)),
        ("communication", _times(events, "talk")),
    ]


def _times(events: Sequence[TraceEvent], *kinds: Kind, threads: set[int] | None = None) -> list[Stretch]:
    return joined((e.start, e.end) for e in events if e.kind in kinds and (threads is None or e.thread in threads))


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
