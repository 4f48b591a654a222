"""When each step began and ended, and what every moment of it was spent on. Pure functions of events."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hotloop.profiling.profile_record import TimeParts
from hotloop.profiling.spans import Stretch, joined, length, within, without
from hotloop.profiling.trace_events import ON_DEVICE, Kind, TraceEvent

SLICES = 200  # of the step that is shown in time


@dataclass(frozen=True)
class StepTimeline:
    """The steps, and the time of each part as stretches that do not overlap."""

    steps: list[Stretch]
    parts: dict[str, list[Stretch]]

    def spent(self, step: int) -> TimeParts:
        """The parts of one step."""
        window = [self.steps[step]]
        return TimeParts(**{name: length(within(window, stretches)) for name, stretches in self.parts.items()})

    def total(self) -> TimeParts:
        """The parts of all steps together."""
        return TimeParts(**{name: length(stretches) for name, stretches in self.parts.items()})

    def slices(self, step: int, count: int = SLICES) -> tuple[TimeParts, ...]:
        """One step cut into pieces of equal length, and the parts of each."""
        start, end = self.steps[step]
        width = (end - start) / count
        pieces = [dict.fromkeys(self.parts, 0.0) for _ in range(count)]
        for name, stretches in self.parts.items():
            for begin, stop in within([(start, end)], stretches) if width else ():
                for index in range(int((begin - start) / width), min(int((stop - start) / width) + 1, count)):
                    left, right = start + index * width, start + (index + 1) * width
                    pieces[index][name] += max(min(stop, right) - max(begin, left), 0.0)
        return tuple(TimeParts(**piece) for piece in pieces)


def on_device(events: Iterable[TraceEvent]) -> bool:
    """Whether a device apart from the host did anything."""
    return any(event.kind in ON_DEVICE for event in events)


def replayed(events: Sequence[TraceEvent], steps: Sequence[Stretch]) -> float:
    """Seconds of the steps in which the device replayed CUDA graphs."""
    return length(within(joined(steps), _times(events, "replay")))


def timeline(events: Sequence[TraceEvent]) -> StepTimeline:
    """Divide the time of the steps between the parts."""
    steps = steps_in(events)
    window = joined(steps)
    return StepTimeline(steps, (_device_parts if on_device(events) else _host_parts)(events, window))


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


def _device_parts(events: Sequence[TraceEvent], window: list[Stretch]) -> dict[str, list[Stretch]]:
    """What the device did; where it did nothing, what the host did instead."""
    threads = training_threads(events)
    order: list[tuple[str, list[Stretch]]] = [
        ("compute", _times(events, "kernel", "replay")),  # between two kernels of a graph, no host is waited for
        ("communication", _times(events, "communication")),
        ("copies", _times(events, "copy")),
        ("data", _times(events, "data", threads=threads)),
        ("waits", _times(events, "wait", threads=threads)),
    ]
    return _by_precedence(order, window)


def _host_parts(events: Sequence[TraceEvent], window: list[Stretch]) -> dict[str, list[Stretch]]:
    """What the host did."""
    threads = training_threads(events)
    order = [
        ("data", _times(events, "data", threads=threads)),
        ("compute", _times(events, "operation", threads=threads)),
        ("communication", _times(events, "talk")),
    ]
    return _by_precedence(order, window)


def _by_precedence(order: list[tuple[str, list[Stretch]]], window: list[Stretch]) -> dict[str, list[Stretch]]:
    """Every moment goes to the first that claims it, and what nobody claims is a gap."""
    rest, parts = window, {}
    for name, stretches in order:
        parts[name] = within(rest, stretches)
        rest = without(rest, stretches)
    parts["gaps"] = rest
    return parts


def _times(events: Sequence[TraceEvent], *kinds: Kind, threads: set[int] | None = None) -> list[Stretch]:
    return joined((e.start, e.end) for e in events if e.kind in kinds and (threads is None or e.thread in threads))
