"""What pages and tables say in one way: values that are unknown, ratios, dates."""

import math
from datetime import datetime

UNKNOWN = "unknown"
TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"  # in place of what was not timed


def times(ratio: float | None) -> str:
    """How many times as fast, with the digits that mean something.

    >>> [times(ratio)[:-1] for ratio in (0.789, 2.314, 15.06, 1542.6)]
    ['0.79', '2.31', '15.1', '1,543']
    """
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    digits = 2 if ratio < 9.995 else 1 if ratio < 99.95 else 0
    return f"{ratio:,.{digits}f}{TIMES}"


def half_spread(middle: float | None, low: float | None, high: float | None) -> str:
    """Half the way from the lowest to the highest as a share of the middle, and nothing where one is not known.

    >>> half_spread(2.0, 1.9, 2.1), half_spread(2.0, None, None)
    ('5%', '')
    """
    return f"{(high - low) / 2 / middle:.0%}" if middle and low is not None and high is not None else ""


def when(iso: str) -> str:
    """A time of day as people write it, and the text itself where it is not one.

    >>> when("2026-01-02T03:04:05+00:00"), when("yesterday")
    ('2026-01-02 03:04:05 UTC', 'yesterday')
    """
    try:
        return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return iso
