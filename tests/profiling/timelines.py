"""Timelines as the tests compose them."""

from hotloop.profiling.events import MARK, Event, Kind

HOST, BACKWARD, STREAM = 1, 2, 7


def mark(at: float, thread: int = HOST) -> Event:
    return Event(MARK, "mark", at, at, thread)


def event(kind: Kind, start: float, end: float, name: str = "", thread: int = HOST, link: int | None = None) -> Event:
    return Event(name or f"a {kind}", kind, start, end, thread, link)
