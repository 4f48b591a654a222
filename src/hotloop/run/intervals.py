"""Durations and intervals in words: "5min", "1000 steps"."""

import re
import sys
from typing import NamedTuple

from hotloop.errors import BadArgument
from hotloop.printing.text import printable

_UNITS = {
    1: ("s", "sec", "secs", "second", "seconds"),
    60: ("m", "min", "mins", "minute", "minutes"),
    3600: ("h", "hour", "hours"),
    86400: ("d", "day", "days"),
}
_SECONDS = {name: seconds for seconds, names in _UNITS.items() for name in names}
_TIME = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)
_STEPS = re.compile(r"\s*(\d{1,15})\s*steps?\s*", re.IGNORECASE | re.ASCII)


class Interval(NamedTuple):
    """The interval of checkpoints, in steps or in seconds."""

    steps: int | None = None
    seconds: float | None = None


def seconds_in(words: str | float, examples: str = '"30s", "5min" or "2h"') -> float:
    """The seconds in a duration such as "5min".

    >>> seconds_in("5min"), seconds_in("1.5 h"), seconds_in(20)
    (300.0, 5400.0, 20.0)
    """
    if isinstance(words, int | float) and not isinstance(words, bool):
        value = float(min(words, sys.float_info.max))  # more than any float is no error, only long
    else:
        match = _TIME.fullmatch(words) if isinstance(words, str) else None
        unit = _SECONDS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise BadArgument(f"{_shown(words)} is not a duration", fix=f"give one such as {examples}")
        value = float(match[1]) * unit
    if not value > 0:
        raise BadArgument(f"{_shown(words)} is not a duration", fix=f"give more than 0, such as {examples}")
    return value


def interval_in(words: str | float) -> Interval:
    """The interval in a text such as "1000 steps".

    >>> interval_in("1000 steps"), interval_in("5min")
    (Interval(steps=1000, seconds=None), Interval(steps=None, seconds=300.0))
    """
    match = _STEPS.fullmatch(words) if isinstance(words, str) else None
    if match and int(match[1]):
        return Interval(steps=int(match[1]))
    return Interval(seconds=seconds_in(words, '"30s", "5min" or "1000 steps"'))


def _shown(words: object) -> str:
    return printable(repr(words)[:80])
