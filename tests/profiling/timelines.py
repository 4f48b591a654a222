"""Timelines as the tests compose them."""

from hotloop.profiling.trace import MARK, Kind, TraceEvent

HOST, BACKWARD, STREAM = 1, 2, 7


def mark(at: float, thread: int = HOST) -> TraceEvent:
    return TraceEvent(MARK, "mark", at, at, thread)


def event(
    kind: Kind, start: float, end: float, name: str = "", thread: int = HOST, link: int | None = None
) -> TraceEvent:
    return TraceEvent(name or f"a {kind}", kind, start, end, thread, link)
